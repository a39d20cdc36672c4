"""The guard over training steps of a model's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from checking import Cell, verdicts

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module

sys.path.append(str(Path(__file__).parents[1] / "training"))  # the ranks find what is on their parent's path

pytestmark = pytest.mark.ranks


def job(model: str, **fields: Any) -> Job:
    return Job(
        model.lower(),
        load_model=model if ":" in model else f"own_step_jobs:{model}",
        load_dataloader="own_step_jobs:rows",
        own_step=True,
        **{"hparams": HParams(precision="float64"), **fields},
    )


EXACT = ["GAN", "Distillation", "EMA", "MoCo", "Accumulating", "Normed", "Exchanging"]
REFUSED = {"Coupled": "gradient", "Summed": "loss", "MoCo": "queue", "Exchanging": "the loss of step 3"}
ARGUMENTS = {"MoCo": {"whole": False}, "Exchanging": {"remembers": True}}


def test_says_whether_steps_are_those_of_one_device() -> None:
    evaluated = {"load_eval_dataloader": "own_step_jobs:rows"}
    cells = [
        Cell(job(name), technique, size) for technique, size in (("single", 1), ("ddp", 2)) for name in EXACT
    ]
    cells += [Cell(job("EMA", **evaluated), "ddp", 2)]
    cells += [Cell(job("lightning_jobs:Classifier", **evaluated), "ddp", 2)]
    cells += [Cell(job("lightning_jobs:GAN"), "ddp", 2)]
    told = verdicts(cells)
    assert dict(zip(cells_named(cells), told, strict=True)) == dict.fromkeys(cells_named(cells), "exact")


def cells_named(cells: list[Cell]) -> list[str]:
    return [f"{cell.job.name} {cell.technique} {bool(cell.job.load_eval_dataloader)}" for cell in cells]


def test_refuses_what_depends_on_the_others_of_a_batch() -> None:
    told = verdicts([Cell(job(name, model_args=ARGUMENTS.get(name, {})), "ddp", 2) for name in REFUSED])
    for (name, says), verdict in zip(REFUSED.items(), told, strict=True):
        assert verdict.startswith("refused"), (name, verdict)
        assert says in verdict


def test_random_numbers_are_others() -> None:
    cells = [Cell(job("Dropping"), "single"), Cell(job("Dropping"), "ddp", 2)]
    assert verdicts(cells) == ["exact", "distribution"]


def test_a_change_that_begins_later_is_seen(tmp_path: Path) -> None:
    from test_loop import try_each

    def request(after: int) -> TrainRequest:
        late = job("Coupled", model_args={"after": after}, hparams=HParams(precision="float64", batches=16))
        return TrainRequest(job=late, technique="ddp", folder=str(tmp_path / str(after)))

    never, late = ranks_module.launch(try_each, [request(99), request(12)], None, size=2)[0]
    looks = [e for e in never["events"] if e["event"] == "looked"]
    assert looks
    assert all(look["checked"] for look in looks)
    assert late["error"] == "ChangesResultError"
    assert "step 16" in late["says"]


def test_spot_checks_count_as_no_steps_of_schedules(tmp_path: Path) -> None:
    from test_spot_checks import check_every_step

    other = job("EveryOther", hparams=HParams(precision="float64", batches=8))
    request = TrainRequest(job=other, technique="ddp", folder=str(tmp_path))
    (told,) = ranks_module.launch(check_every_step, [request], True, size=2)[0]
    assert [event["checked"] for event in told["events"] if event["event"] == "looked"] == [True] * 8, told
    rates = [event["lr"] for event in told["events"] if event["event"] == "step"]
    assert rates == [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125, 0.00625]
