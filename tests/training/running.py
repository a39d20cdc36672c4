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


def save_pretrained_gpt2(folder: Path) -> None:
    """A small model of transformers, drawn with a seed, as ``from_pretrained`` reads it; it drops nothing."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    off: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(3)
    GPT2LMHeadModel(GPT2Config(**sizes, **off)).save_pretrained(folder)
