"""What the guard costs: seconds of comparing over those of the whole trial: `python benchmarks/guard.py`.

The trials of a job are those of one sweep: what one left of plain steps, the next need not take.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from machine import describe

from saturn_airflow import HParams, Job
from saturn_airflow.launch import runs
from saturn_airflow.launch.request import Measure
from saturn_airflow.launch.runs import RunSpec

DAGS = str(Path(__file__).resolve().parents[1] / "dags")
#: What a trial of it may spend on the guard, as a share of its time.
ALLOWED = 0.15
MODELS = {
    "small": {"n_layer": 2, "n_embd": 64},
    "larger": {"n_layer": 6, "n_embd": 256},
}
STRATEGIES = [("single", 1), ("spill", 1), ("ddp", 2), ("fsdp", 2), ("pipeline", 2)]


def trial(name: str, technique: str, devices: int, folder: Path) -> dict[str, Any]:
    """One trial: the seconds it had its devices for, those of them that the guard took, and its verdict."""
    spec = RunSpec(
        job=Job(
            name,
            load_model="shop.models:gpt2",
            load_dataloader="shop.data:python_text",
            loss_function="shop.models:lm_loss",
            model_args=MODELS[name],
            hparams=HParams(epochs=1, batch_size=32),
        ),
        technique=technique,
        mode="trial",
        node="here",
        kind="cpu",
        slots=2,
        devices=devices,
        folder=str(folder / f"{name}-{technique}"),
        leases_folder=str(folder / "leases"),
        plain_steps_folder=str(folder / "plain steps"),
        path=(DAGS,),
        measure=Measure(least_seconds=0.5, precise_seconds=3.0),
    )
    events = list(runs.start(spec).events())
    guards = [event for event in events if event["event"] == "guard"]
    leased = next(event["time"] for event in events if event["event"] == "leased")
    whole, guarding = events[-1]["time"] - leased, sum(event["seconds"] for event in guards)
    verdicts = sorted({event["verdict"] for event in guards})
    return {
        "trial_seconds": whole,
        "guard_seconds": guarding,
        "share": guarding / whole,
        "verdicts": verdicts,
    }


def main() -> None:
    """Run the trials, print their shares, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--note", help="what else the machine did, kept with the figures")
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe(), "note": args.note, "allowed": ALLOWED, "trials": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            for technique, devices in STRATEGIES:
                found = trial(name, technique, devices, Path(folder))
                figures["trials"][f"{name}, {technique} x {devices}"] = found
                print(
                    f"{name}, {technique} x {devices}: {found['guard_seconds']:.2f} s of "
                    f"{found['trial_seconds']:.1f} s, {found['share']:.1%} ({', '.join(found['verdicts'])})"
                )
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
