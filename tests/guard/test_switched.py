"""What training switches once in a model is resumed or refused, and so is what data remember."""

from __future__ import annotations

from pathlib import Path

import pytest
from checking import Cell, job, verdicts
from switching_jobs import ByTheFirst, Noisy, NoisyAnew, NoisyOutOfSight, drawn_once
from test_resumed_model import losses
from torch.utils.data import DataLoader

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.loaders import samples_stand_alone

STEPS = {"batches": 9}
# A stop before it is switched, one after, and one within the next epoch.
RESUMED = {
    "freezes": job(load_model="switching_jobs:once", model_args={"what": "freezes"}, hparams=STEPS),
    "evaluates": job(load_model="switching_jobs:once", model_args={"what": "evaluates"}, hparams=STEPS),
    "data that remember what they drew": job(load_dataloader="switching_jobs:noisy", hparams=STEPS),
}
WRITES = {"load_model": "switching_jobs:writes"}
VERDICTS = {
    **{what: (Cell(one, "single"), "exact") for what, one in RESUMED.items()},
    **{
        what: (
            Cell(job(load_model="switching_jobs:once", model_args={"what": what}), "single"),
            "job: training adds or removes hooks on gradients: 'extra.layer",
        )
        for what in ("hooks", "unhooks")
    },
    "hooks each time": (
        Cell(job(load_model="switching_jobs:once", model_args={"what": "hooks each time"}), "single"),
        "exact",
    ),
    "data that remember out of sight": (
        Cell(job(load_dataloader="switching_jobs:noisy_out_of_sight"), "single"),
        "job: the dataset draws random numbers for a sample when that is fetched first",
    ),
    "batches that are written into": (
        Cell(job(**WRITES, load_dataloader="switching_jobs:kept_batches"), "single"),
        "job: training writes into the batches of load_dataloader",
    ),
    "batches that are filled anew": (
        Cell(
            job(**WRITES, load_dataloader="switching_jobs:refilled", hparams={"batch_size": None}), "single"
        ),
        "exact",
    ),
    "batches that are made anew": (
        Cell(job(**WRITES, load_dataloader="switching_jobs:doubles"), "single"),
        "exact",
    ),
    **{
        f"pieces of a batch that are written into under {technique}": (
            Cell(
                job(
                    load_model="switching_jobs:writes_in_a_row",
                    load_dataloader="switching_jobs:doubles",
                    loss_function="switching_jobs:pair_loss",
                ),
                technique,
                2,
            ),
            "exact",
        )
        for technique in ("ddp", "pipeline")
    },
    "masks that are written into batches": (
        Cell(job(load_model="switching_jobs:masks", load_dataloader="switching_jobs:doubles"), "single"),
        "exact",
    ),
    **{
        f"copies of weights under {technique}": (
            Cell(job(load_model="switching_jobs:goes_back"), technique, devices),
            verdict,
        )
        for technique, devices, verdict in [
            ("single", 1, "exact"),
            ("ddp", 2, "exact"),
            ("fsdp", 2, "can't: the model's attribute 'kept' holds tensors like the weights"),
        ]
    },
    **{
        f"a list of tensors of each parameter under {technique}": (
            Cell(job(hparams={"optimizer": "odd_optimizers:KeepsLists"}), technique, 2),
            verdict,
        )
        for technique, verdict in [
            ("ddp", "exact"),
            ("fsdp", "can't: what the optimizer keeps as 'last' is of type DTensor, which no checkpoint"),
        ]
    },
    **{
        f"a number of each parameter under {technique}": (
            Cell(job(hparams={"optimizer": "odd_optimizers:KeepsNorms"}), technique, 2),
            verdict,
        )
        for technique, verdict in [
            ("ddp", "exact"),
            ("fsdp", "can't: what the optimizer keeps as 'norm' is of type DTensor, which no checkpoint"),
        ]
    },
    "complex numbers in parts": (
        Cell(job(load_model="switching_jobs:waves"), "fsdp", 2),
        "can't: parameter 'first' is complex128, of which no file of a checkpoint can hold parts",
    ),
    "batches that nobody writes into": (
        Cell(job(load_dataloader="switching_jobs:kept_batches"), "single"),
        "exact",
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return dict(zip(VERDICTS, verdicts([cell for cell, _ in VERDICTS.values()]), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("what", VERDICTS)
def test_what_a_resumed_job_would_lose_is_refused_and_nothing_else(what: str, found: dict[str, str]) -> None:
    assert found[what].startswith(VERDICTS[what][1]), found[what]


def trained(a_job: Job, folder: Path, stops: list[int | None]) -> float:
    for stop in stops:
        ((loss,),) = ranks_module.launch(losses, a_job, str(folder), [stop], size=1)
    return float(loss)


@pytest.mark.ranks
@pytest.mark.parametrize("what", RESUMED)
def test_what_is_switched_once_is_resumed(what: str, tmp_path: Path) -> None:
    whole = trained(RESUMED[what], tmp_path / "whole", [None])
    assert trained(RESUMED[what], tmp_path / "parts", [2, 3, None]) == whole


@pytest.mark.parametrize(("dataset", "alone"), [(Noisy(), False), (NoisyAnew(), True), (ByTheFirst(), False)])
def test_samples_that_depend_on_those_before_do_not_stand_alone(dataset: Noisy, alone: bool) -> None:
    loader = DataLoader(dataset, batch_size=4)
    assert samples_stand_alone(loader, 0) is alone
    assert not dataset.noise, "looking leaves nothing behind"


def test_what_is_remembered_out_of_sight_is_refused() -> None:
    drawn_once.cache_clear()
    with pytest.raises(JobError, match=r"functools\.lru_cache"):
        samples_stand_alone(DataLoader(NoisyOutOfSight(), batch_size=4), 0)
