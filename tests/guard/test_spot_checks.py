"""What begins to differ after the guard's steps stops the job, and looking changes nothing."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checking import job

from saturn_airflow.launch import host_memory
from saturn_airflow.launch.request import ChangesResultError, DoesNotFit, TrainRequest
from saturn_airflow.model.errors import JobError
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.guarding import comparing, spot_checks
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

SGD = {"optimizer": "torch.optim:SGD", "lr": 0.01, "batches": 40}
LATE: dict[str, tuple[Any, str, int]] = {
    "a buffer": (job(load_model="late_jobs:coupled_later", hparams=SGD), "ddp", 2),
    "an attribute": (
        job(load_model="late_jobs:coupled_later", model_args={"buffer": False}, hparams=SGD),
        "fsdp",
        2,
    ),
    "a last batch of one sample": (
        job(
            load_model="late_jobs:coupled_later",
            data_args={"samples": 21},
            hparams={"optimizer": "torch.optim:SGD", "lr": 0.01, "epochs": 7, "batch_size": 4},
        ),
        "ddp",
        2,
    ),
    "a global": (job(loss_function="late_jobs:counting_loss", hparams=SGD), "ddp", 2),
    "a stream": (
        job(load_dataloader="late_jobs:stream", loss_function="late_jobs:masked_mean", hparams=SGD),
        "ddp",
        2,
    ),
}


def take(requests: list[TrainRequest], guard: bool, looking: bool, ranks: Ranks) -> list[dict[str, Any]]:
    """What the guard says of each, or how its training ends."""
    if not looking:
        spot_checks.can_differ = lambda *unused: False
    told = []
    for request in requests:
        events: list[dict[str, Any]] = []
        watched = dataclasses.replace(ranks, _emit=events.append)
        try:
            end = check(request, ranks) if guard else train(request, watched)
        except (ChangesResultError, DoesNotFit, JobError) as error:
            end = {"status": type(error).__name__, "says": str(error)}
        told.append({**end, "events": events})
    return told


def trained(requests: list[TrainRequest], size: int = 2, looking: bool = True) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = ranks_module.launch(take, requests, False, looking, size=size)[0]
    return told


def request(a_job: Any, technique: str, folder: Path, **changes: Any) -> TrainRequest:
    settings = {"checkpoint_seconds": None, **changes}
    return TrainRequest(job=a_job, technique=technique, folder=str(folder), **settings)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("late")
    requests = [request(a, technique, folder / what) for what, (a, technique, _) in LATE.items()]
    verdicts = ranks_module.launch(take, requests, True, True, size=2)[0]
    ended = trained(requests)
    return {what: {**v, **e} for what, v, e in zip(LATE, verdicts, ended, strict=True)}


@pytest.mark.parametrize("what", LATE)
def test_what_begins_later_stops_the_job(what: str, late: dict[str, dict[str, Any]]) -> None:
    told = late[what]
    assert told["guard"] == "exact", "three steps did not show it"
    assert told["status"] == "ChangesResultError", told


# What must not notice that it is looked at, with a norm over the batch where that can be.
UNNOTICED = {
    "single accumulate": (1, "single", {"accumulate": 2}, {}),
    "single recompute": (1, "single", {"clip_grad_norm": 0.5}, {"recompute": True}),
    "spill": (1, "spill", {}, {}),
    "ddp": (2, "ddp", {"clip_grad_norm": 0.5}, {}),
    "fsdp": (2, "fsdp", {}, {}),
    "fsdp offload": (2, "fsdp", {}, {"offload": True, "recompute": True}),
    "tensor": (2, "tensor", {}, {}),
    "pipeline": (2, "pipeline", {}, {"micro_batches": 2, "schedule": "1f1b"}),
}


def check_every_step(requests: list[TrainRequest], looking: bool, ranks: Ranks) -> list[dict[str, Any]]:
    spot_checks.checked_steps = lambda *unused: list(range(1, 100))
    return take(requests, False, looking, ranks)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_notices_that_it_is_looked_at(size: int, tmp_path: Path) -> None:
    told = []
    chosen = {what: cell for what, cell in UNNOTICED.items() if cell[0] == size}
    for looking in (True, False):
        requests = []
        for what, (_, technique, hparams, parameters) in chosen.items():
            in_parts = technique == "pipeline" or "accumulate" in hparams  # type: ignore[operator]
            a_job = job(
                load_model="late_jobs:row" if technique == "pipeline" else "late_jobs:remembers",
                model_args={"norm": not in_parts, "counts": not in_parts},
                loss_function="odd_models:mean_loss" if in_parts else "late_jobs:calls_loss",
                hparams={"batches": 6, **hparams},  # type: ignore[dict-item]
            )
            folder = tmp_path / f"{looking}" / what
            requests.append(request(a_job, technique, folder, parameters=parameters))
        told.append(ranks_module.launch(check_every_step, requests, looking, size=size)[0])
    for what, seen, unseen in zip(chosen, *told, strict=True):
        assert seen["status"] == unseen["status"] == "finished", (what, seen, unseen)
        looked = [event for event in seen["events"] if event["event"] == "looked"]
        assert [event["checked"] for event in looked] == [True] * 6, (what, seen["events"])
        losses = [[e["loss"] for e in told["events"] if e["event"] == "step"] for told in (seen, unseen)]
        assert losses[0] == losses[1], what
        weights = [read_weights(told["checkpoint"]) for told in (seen, unseen)]
        assert [n for n, w in weights[0].items() if not torch.equal(w, weights[1][n])] == [], what


def test_what_draws_by_a_function_imported_by_name_is_looked_at(tmp_path: Path) -> None:
    model = "drawing_models:skips_by_name"
    cells = {"spill": 1, "single": 2}
    told = []
    for looking in (True, False):
        requests = [
            request(
                job(load_model=model, hparams={"batches": 6, "accumulate": parts}),
                technique,
                tmp_path / f"{looking}" / technique,
            )
            for technique, parts in cells.items()
        ]
        told.append(ranks_module.launch(check_every_step, requests, looking, size=1)[0])
    for technique, seen, unseen in zip(cells, *told, strict=True):
        assert seen["status"] == unseen["status"] == "finished", (technique, seen, unseen)
        losses = [[e["loss"] for e in told["events"] if e["event"] == "step"] for told in (seen, unseen)]
        assert losses[0] == losses[1], technique


def check_in_a_full_container(requests: list[TrainRequest], ranks: Ranks) -> list[dict[str, Any]]:
    host_memory._groups = lambda: iter([(Path("/sys/fs/cgroup"), 2.0**30, 2.0**30 - 1.0)])  # type: ignore[assignment,misc]
    return check_every_step(requests, True, ranks)


def test_no_whole_model_is_gathered_beyond_what_its_container_may_have(tmp_path: Path) -> None:
    asked = request(job(hparams={"batches": 1}), "fsdp", tmp_path)
    told = ranks_module.launch(check_in_a_full_container, [asked], size=2)[0][0]
    (warning,) = [event["message"] for event in told["events"] if event["event"] == "warning"]
    assert warning.endswith("the whole model does not fit in the host's memory")


@pytest.mark.parametrize(("technique", "size"), [("spill", 1), ("ddp", 2)])
def test_what_follows_in_the_forward_pass_follows_no_spot_check(
    technique: str, size: int, tmp_path: Path
) -> None:
    ways = [
        {"in_place": in_place, "frozen": frozen} for in_place in (True, False) for frozen in (True, False)
    ]
    told = []
    for looking in (True, False):
        asked = [
            request(
                job(load_model="late_jobs:follows", model_args=way, hparams={"batches": 6}),
                technique,
                tmp_path / f"{looking}{number}",
            )
            for number, way in enumerate(ways)
        ]
        told.append(ranks_module.launch(check_every_step, asked, looking, size=size)[0])
    for way, seen, unseen in zip(ways, *told, strict=True):
        looked = [event["checked"] for event in seen["events"] if event["event"] == "looked"]
        assert looked == [True] * 6, (way, seen["events"])
        losses = [[e["loss"] for e in one["events"] if e["event"] == "step"] for one in (seen, unseen)]
        assert losses[0] == losses[1], way


def test_spot_checks_leave_batches_as_they_are(tmp_path: Path) -> None:
    a_job = job(
        load_model="late_jobs:ChangesInputs",
        load_dataloader="late_jobs:kept_batches",
        hparams={"batch_size": None, "epochs": 3},
    )
    told = [
        ranks_module.launch(
            check_every_step, [request(a_job, "spill", tmp_path / f"{looking}")], looking, size=1
        )[0][0]
        for looking in (True, False)
    ]
    assert [event["event"] for event in told[0]["events"]].count("looked") == 9
    seen, unseen = ([e["loss"] for e in t["events"] if e["event"] == "step"] for t in told)
    assert seen == unseen


def test_a_model_that_asks_for_ranks_is_looked_at_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    a_job = job(model_args={"extra": "reduces"}, hparams={"batches": 6})
    (told,) = trained([request(a_job, "ddp", tmp_path, checkpoint_batches=1)])
    assert told["status"] == "finished"
    assert told["events"][-1]["event"] != "warning"
    assert any(event["event"] == "looked" and event["checked"] for event in told["events"])


def train_after_looks(requests: list[TrainRequest], steps: list[int], ranks: Ranks) -> list[dict[str, Any]]:
    spot_checks.checked_steps = lambda *unused: steps
    return take(requests, False, True, ranks)


def test_what_was_trained_since_the_last_look_is_not_gone_on_from(tmp_path: Path) -> None:
    a_job, *_ = LATE["a buffer"]
    saving = request(a_job, "ddp", tmp_path / "moved", checkpoint_batches=3, keep_checkpoints=1)
    (told,) = ranks_module.launch(train_after_looks, [saving], [10], size=2)[0]
    assert told["status"] == "ChangesResultError"
    assert "at step 40, and did not when it was last compared with one device, in step 10" in told["says"]
    assert [path.name for path in saving.checkpoints.glob("step-*")] == ["step-00000009"]
    alone = [dataclasses.replace(saving, technique="single"), request(a_job, "single", tmp_path / "single")]
    moved, unmoved = trained(alone, size=1)
    assert next(e["step"] for e in moved["events"] if e["event"] == "start") == 9
    assert moved["loss"] == pytest.approx(unmoved["loss"], rel=1e-12)


@pytest.mark.parametrize("stopped_at", [9, None])
def test_who_goes_on_from_what_was_not_looked_at_is_told(tmp_path: Path, stopped_at: int | None) -> None:
    a_job = job(hparams={"batches": 12})
    saving = request(a_job, "ddp", tmp_path, batch_count=stopped_at, checkpoint_batches=4)
    trained([saving])
    if stopped_at is None:  # as if it had been killed before its end
        shutil.rmtree(saving.checkpoints / "step-00000012")
    (told,) = trained([dataclasses.replace(saving, technique="single", batch_count=None)], size=1)
    warnings = [e["message"] for e in told["events"] if e["event"] == "warning"]
    if stopped_at is None:
        assert "ddp x 2 trained up to step 8, and was last compared with one device at step 0" in warnings[0]
    else:
        assert not warnings, "its last step was looked at"


@pytest.mark.parametrize(
    ("total", "cost", "steps"),
    [
        (40, 4, []),
        (1000, 4, [100]),
        (1_000_000, 4, [10, 100, 1000, 10_000, 100_000]),
        (None, 4, [1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]),
    ],
)
def test_spot_checks_take_a_small_share(total: int | None, cost: float, steps: list[int]) -> None:
    found = spot_checks.checked_steps(total, cost, seed=1)
    assert set(steps) <= set(found)
    assert found == spot_checks.checked_steps(total, cost, seed=1), "a resumed training looks at the same"
    for number, step in enumerate(found, 1):
        assert number * cost <= 0.01 * (total or step)
    others = set(found) - set(steps)
    assert len(others) <= len(steps)
    if others:
        assert spot_checks.checked_steps(total, cost, seed=2) != found


def no_room_for_a_second(requests: list[TrainRequest], ranks: Ranks) -> list[dict[str, Any]]:
    """As :func:`take`, with too little memory for a plain loop that is off by rounding."""

    def raising(model: torch.nn.Module, number_format: torch.dtype, way: int = 0) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    comparing.put_off_by_rounding = raising
    return take(requests, False, True, ranks)


def test_what_differs_counts_where_memory_does_not_suffice_to_tell_noise(tmp_path: Path) -> None:
    a_job, technique, size = LATE["a buffer"]
    (told,) = ranks_module.launch(no_room_for_a_second, [request(a_job, technique, tmp_path)], size=size)[0]
    assert told["status"] == "ChangesResultError", told
    said = [event["message"] for event in told["events"] if event["event"] == "warning"]
    assert any("it can't be told whether rounding makes what differs" in one for one in said)
