"""What the tests of runs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saturn_airflow import HParams, Job
from saturn_airflow.launch.runs import RunSpec

USERLAND = Path(__file__).parent / "userland"


def small_job(loss: str = "squared", data_args: dict[str, Any] | None = None, **hparams: Any) -> Job:
    """A job of the user's that takes milliseconds a batch."""
    return Job(
        f"small-{loss}",
        load_model="small_jobs:linear",
        load_dataloader="small_jobs:noise",
        loss_function=f"small_jobs:{loss}",
        data_args=data_args or {},
        hparams=HParams(**{"batches": 50, "lr": 0.01, **hparams}),
    )


def spec_for(folder: Path, job: Job, technique: str = "single", devices: int = 1, **settings: Any) -> RunSpec:
    """A run on two CPU slots with locks of its own."""
    defaults: dict[str, Any] = {
        "folder": str(folder / "state"),
        "node": "local",
        "kind": "cpu",
        "slots": 2,
        "leases_folder": str(folder / "leases"),
        "path": (str(USERLAND),),
        "technique_folders": (str(USERLAND / "techniques"),),
        "verdict": "exact",
    }
    return RunSpec(job=job, technique=technique, devices=devices, **{**defaults, **settings})
