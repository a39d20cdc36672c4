"""What a resumed job would lose is refused, wherever it is remembered; and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import odd_models
import pytest
from checking import Cell, job, verdicts

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.used_modules import python_modules

pytestmark = pytest.mark.ranks

KEPT = [
    *("buffer", "passing buffer", "shaped by the first batch", "slots"),
    *("closure", "closure that keeps nothing", "module as a default"),
]
LOST = {"large passing buffer": "its buffers ['passes'] are too large to be saved (persistent=False)"}


def growing(kind: str, **changes: Any) -> Any:
    return job(load_model="growing_models:growing", model_args={"kind": kind}, **changes)


def test_what_checkpoints_keep_passes_and_what_they_lose_is_refused() -> None:
    found = verdicts([Cell(growing(kind), "single") for kind in [*KEPT, *LOST]])
    for verdict in found[: len(KEPT)]:
        assert verdict == "exact"
    for verdict, why in zip(found[len(KEPT) :], LOST.values(), strict=True):
        assert verdict.startswith("job: training depends on something that it changes"), verdict
        assert why in verdict


def test_a_loss_that_nobody_can_repeat_is_told_from_one_that_remembers() -> None:
    (verdict,) = verdicts([Cell(job(loss_function="drawing_models:loss_by_chance"), "single")])
    assert verdict.startswith("job: the loss of one batch is ")
    assert "os.urandom()" in verdict


def test_an_optimizer_goes_on_from_what_checkpoints_keep_of_it_or_is_refused() -> None:
    wanted = {
        "Weakens": "exact",
        "CountsInClass": "exact",
        "CountsInClosure": "makes other steps where it goes on from a checkpoint",
        "CantBeLoaded": "can't go on from a checkpoint of it, so its job could not be resumed: RuntimeError",
        "KeepsObjects": "what the optimizer keeps of 'enter.weight' as 'kept' is of type object",
    }
    jobs = [
        job(hparams={"optimizer": f"odd_optimizers:{name}", "optimizer_args": {"momentum": 0.9}})
        for name in wanted
    ]
    for verdict, says in zip(verdicts([Cell(one, "single") for one in jobs]), wanted.values(), strict=True):
        assert says in verdict
        assert verdict.startswith(("exact", "job: "))


def test_what_looks_at_gradients_on_their_way_is_refused() -> None:
    a_job = job(load_model="odd_models:clamped", loss_function="odd_models:three_of_each")
    alone, shared = verdicts([Cell(a_job, "single"), Cell(a_job, "ddp", 2)])
    assert alone.startswith("refused: single x 1 changes the result: the gradient of 'enter")
    assert shared.startswith("refused: ddp x 2 changes the result: the gradient of 'enter")


def losses(a_job: Job, folder: str, steps: list[int | None], ranks: Ranks) -> list[float]:
    found = []
    for count in steps:
        request = TrainRequest(job=a_job, technique="single", folder=folder, batch_count=count)
        found.append(train(request, ranks)["loss"])
    return found


def test_a_buffer_that_took_its_shape_with_the_first_batch_is_resumed(tmp_path: Path) -> None:
    a_job = growing("shaped by the first batch", hparams={"batches": 4})
    ((whole,),) = ranks_module.launch(losses, a_job, str(tmp_path / "whole"), [None], size=1)
    ((_, resumed),) = [
        [  # type: ignore[misc]
            *ranks_module.launch(losses, a_job, str(tmp_path / "parts"), [2], size=1)[0],
            *ranks_module.launch(losses, a_job, str(tmp_path / "parts"), [None], size=1)[0],
        ]
    ]
    assert resumed == whole  # type: ignore[has-type]


def test_the_job_s_code_is_known_where_a_technique_gave_its_modules_other_classes() -> None:
    model = odd_models.plain()
    model.__class__ = type("Sharded", (model.__class__,), {"__module__": "torch.distributed"})
    for module in model.blocks:  # type: ignore[union-attr]
        module.__class__ = type("Sharded", (module.__class__,), {"__module__": "torch.distributed"})
    assert python_modules(job(load_model="elsewhere:plain", loss_function=None), model) == {"odd_models"}
