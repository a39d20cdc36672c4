"""What looks at a whole batch is refused in micro-batches, or is trained on them as a plain loop does."""

from __future__ import annotations

import json
from pathlib import Path

import micro_batches
import pytest
from cells import Outcome, Strategy, job, run
from cells import request as train_request

from saturn_airflow.launch.request import ChangesResultError, DoesNotFit, TrainRequest
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

SINGLE, SPILL, DDP, FSDP, DDP3 = (
    *(Strategy("single"), Strategy("spill"), Strategy("ddp", 2), Strategy("fsdp", 2)),
    Strategy("ddp", 3),
)
EXACT = [
    *[("cnn", s) for s in (SINGLE, Strategy("single", 1, {"recompute": True}), SPILL, DDP, FSDP, DDP3)],
    *[(model, s) for model in ("spectral", "teacher") for s in (SINGLE, DDP)],
    *[("contrastive", s) for s in (SINGLE, Strategy("single", 1, {"recompute": True}))],
    *[("averaging", SINGLE), ("codebook", SINGLE), ("codebook", Strategy("ddp", 1))],
]
#: What takes micro-batches apart themselves, and why that is refused.
REFUSED = [
    ("contrastive", DDP, "ddp on 2 devices cuts batches into parts"),
    ("contrastive", FSDP, "fsdp on 2 devices cuts batches into parts"),
    ("averaging", DDP, "buffer '1.seen' comes out otherwise"),
    ("codebook", DDP, "buffer 'codes' comes out otherwise"),
    ("cnn", Strategy("pipeline", 2), "whose statistics would be those of each micro-batch of a pipeline"),
]
WAY_OUT = "or say Job(trust=['single']), with which micro-batches are computed one by one"


def job_of(name: str, *, trusting: bool = True, **changes: object) -> Job:
    return job(
        load_model="micro_batches:model",
        model_args={"name": name},
        load_dataloader="micro_batches:data",
        load_eval_dataloader="micro_batches:data",
        loss_function=micro_batches.JOBS[name][1],
        trust=["single"] if trusting else [],
        hparams=HParams(
            epochs=micro_batches.EPOCHS,
            accumulate=micro_batches.ACCUMULATE,
            precision="float64",
            lr=micro_batches.LR,
            optimizer="torch.optim:SGD",
            optimizer_args={"momentum": 0.9},
        ),
        **changes,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("micro-batches")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[tuple[str, str], Outcome]:
    cells = {(name, str(strategy)): (name, strategy) for name, strategy, *_ in [*EXACT, *REFUSED]}
    requests = [
        (train_request(job_of(name), strategy, folder / f"{name} {strategy}"), strategy.devices)  # type: ignore[arg-type, union-attr]
        for name, strategy in cells.values()
    ]
    return dict(zip(cells, run(requests), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "strategy"), EXACT, ids=str)
def test_it_is_what_a_plain_loop_trains(
    outcomes: dict[tuple[str, str], Outcome], folder: Path, name: str, strategy: Strategy
) -> None:
    losses, evaluations, state = micro_batches.plain(name)
    outcome = outcomes[name, str(strategy)]
    assert not outcome.refused, outcome.refused
    assert list(outcome.losses.values()) == pytest.approx(losses, abs=1e-12)
    for key, value in outcome.weights.items():
        assert value.reshape(-1).double().tolist() == pytest.approx(
            state[key].reshape(-1).tolist(), rel=1e-11, abs=1e-11
        )
    saved = max((folder / f"{name} {strategy}" / "checkpoints").glob("step-*")) / "manifest.json"
    told = json.loads(saved.read_text())["extra"]["metrics"]["eval_loss"]
    assert told == pytest.approx(evaluations[-1], abs=1e-12)


@pytest.mark.parametrize(("name", "strategy", "why"), REFUSED, ids=str)
def test_what_takes_micro_batches_apart_is_refused(
    outcomes: dict[tuple[str, str], Outcome], name: str, strategy: Strategy, why: str
) -> None:
    assert why in str(outcomes[name, str(strategy)].refused)


def verdicts_of(requests: list[TrainRequest], ranks: Ranks) -> list[str]:
    verdicts = []
    for one in requests:
        try:
            verdicts.append(check(one, ranks)["guard"])
        except (ChangesResultError, DoesNotFit) as reason:
            verdicts.append(str(reason))
    return verdicts


def test_the_guard_compares_with_micro_batches(tmp_path: Path) -> None:
    cells = [(name, strategy) for name, strategy in EXACT if strategy.devices == 2]
    requests = [train_request(job_of(name), s, tmp_path) for name, s in cells]
    # What forward passes count is of as many passes as there are micro-batches.
    assert ranks_module.launch(verdicts_of, requests, size=2)[0] == ["exact"] * len(cells)


def test_without_trust_it_is_refused_with_the_way_out(tmp_path: Path) -> None:
    names = [name for name in micro_batches.JOBS if name != "codebook"]
    requests = [train_request(job_of(name, trusting=False), SINGLE, tmp_path) for name in names]
    for name, verdict in zip(names, ranks_module.launch(verdicts_of, requests, size=1)[0], strict=True):
        assert WAY_OUT in verdict, (name, verdict)


def test_jobs_that_say_they_couple_samples_need_trust_too() -> None:
    assert job_of("contrastive", couples_batch=True).in_micro_batches
    with pytest.raises(InvalidSweepError, match=r"take one of the two out, or say Job\(trust"):
        job_of("contrastive", trusting=False, couples_batch=True)
