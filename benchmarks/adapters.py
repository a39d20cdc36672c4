"""What checkpoints of adapters take on disk and in time: `python benchmarks/adapters.py`. On one device.

GPT-2 of 124 million parameters (random ones) trains LoRA adapters with a checkpoint after each step, once
with its base in a folder beside the checkpoints, and once with the base in each of them, as it was before
there was such a folder. A second training resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch.utils.data import DataLoader

from saturn_airflow import HParams, Job
from saturn_airflow.launch import checkpoint_files
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training import checkpoints
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="with a checkpoint after each (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    rows = [measure(args.steps, beside) for beside in (True, False)]
    text = json.dumps({"machine": describe(), "rows": rows}, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def adapted() -> Any:
    """GPT-2 with LoRA adapters of PEFT's."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(GPT2LMHeadModel(GPT2Config()), config)


def table(batch_size: int) -> DataLoader[Any]:
    """Random tokens."""
    ids = torch.randint(0, 50_000, (64, 16), generator=torch.Generator().manual_seed(1))
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    return DataLoader(rows, batch_size=batch_size)


def measure(steps: int, beside: bool) -> dict[str, Any]:
    """Train and resume, with the base ``beside`` the checkpoints or in each of them."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            "tuned",
            load_model="adapters:adapted",
            load_dataloader="adapters:table",
            hparams=HParams(batches=steps + 1, batch_size=2),
        )
        request = TrainRequest(
            job=job,
            technique="single",
            folder=folder,
            batch_count=steps,
            checkpoint_batches=1,
            checkpoint_seconds=None,
        )
        (told,) = ranks_module.launch(trained, request, beside, size=1)
        (again,) = ranks_module.launch(trained, request, beside, size=1)
        kept = Path(folder) / "checkpoints"
        sizes = {path.name: checkpoint_files.bytes_of(path) for path in kept.glob("*/")}
    seconds = [event["seconds"] for event in told if event.get("event") == "checkpoint"]
    return {
        "base": "beside the checkpoints" if beside else "in each checkpoint",
        "checkpoint_mb": round(min(size for name, size in sizes.items() if "step" in name) / 1e6, 1),
        "job_mb": round(sum(sizes.values()) / 1e6, 1),
        "first_checkpoint_seconds": round(seconds[0], 2),
        "checkpoint_seconds": round(statistics.median(seconds[1:]), 2),
        "resuming_seconds": round(next(e["setup_seconds"] for e in again if "setup_seconds" in e), 2),
    }


def trained(request: TrainRequest, beside: bool, ranks: Ranks) -> list[dict[str, Any]]:
    """The events of a training, and its result."""
    import dataclasses

    if not beside:
        checkpoints.worth_a_folder = lambda frozen, lengths: False  # type: ignore[attr-defined]
    events: list[dict[str, Any]] = []
    result = train(request, dataclasses.replace(ranks, _emit=events.append))
    return [*events, result]


if __name__ == "__main__":
    main()
