"""From a killed process of a training to its next step: `python benchmarks/restarts.py`. Without Airflow.

A small job that sleeps a tenth of a second per batch, with a checkpoint every two seconds, loses a rank, or
the process of its technique, again and again; its supervisor starts them again. A technique has a process
where it is not Saturn's: its file is copied. Printed: seconds until the first step after the last checkpoint
was done, and the steps that were trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import describe

from saturn_airflow import HParams, Job
from saturn_airflow.launch import runs
from saturn_airflow.launch.runs import Run, RunSpec

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=5, help="how often each is killed (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": {**describe(), "load_average": round(os.getloadavg()[0], 1)}}
    results["rows"] = [
        measure(technique, devices, whose, args.times)
        for technique, devices in (("single", 1), ("ddp", 2))
        for whose in ("a rank", "the technique's process")
    ]
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(technique: str, devices: int, whose: str, times: int) -> dict[str, Any]:
    """Kill one kind of process of one training ``times`` times."""
    job = Job(
        "loses-processes",
        load_model="soak_jobs:linear",
        load_dataloader="soak_jobs:points",
        loss_function="soak_jobs:loss",
        hparams=HParams(batches=100_000, batch_size=8, lr=0.01),
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if whose != "a rank":
            shutil.copytree(HERE.parent / "techniques", f"{folder}/techniques")
        spec = RunSpec(
            job=job,
            technique=technique,
            devices=devices,
            folder=f"{folder}/job",
            node="restarts",
            kind="cpu",
            slots=2,
            leases_folder=f"{folder}/leases",
            path=(str(HERE / "soak"),),
            technique_folders=(f"{folder}/techniques",),
            verdict="exact",
            checkpoint_seconds=2.0,
        )
        run = runs.start(spec)
        took = [lose(run, whose) for _ in range(times)]
        run.kill()
    seconds, steps = zip(*took, strict=True)
    return {
        "technique": technique,
        "devices": devices,
        "killed": whose,
        "times": times,
        "seconds_until_the_next_step": {
            "median": round(statistics.median(seconds), 2),
            "worst": round(max(seconds), 2),
        },
        "steps_trained_again": {"median": statistics.median(steps), "worst": max(steps)},
    }


def lose(run: Run, whose: str) -> tuple[float, int]:
    """Kill a process once there is a checkpoint and ten steps after it: the seconds and steps that cost."""
    said = wait(run, lambda said: _step(said) >= _saved(said) + 10 and _saved(said) > _started(said))
    before = len(said)
    supervisor = psutil.Process(int((run.folder / "alive").read_text()))
    below = sorted(supervisor.children(), key=lambda p: p.create_time())
    killed = time.time()
    below[-1 if whose == "a rank" else 0].kill()
    started = wait(run, lambda said: any(e["event"] == "start" for e in said[before:]))
    at = next(i for i, event in enumerate(started) if i >= before and event["event"] == "start")
    again = wait(run, lambda said: any(e["event"] == "step" for e in said[at:]))
    step = next(event for event in again[at:] if event["event"] == "step")
    last = max(event["step"] for event in again[:at] if event["event"] == "step")
    return step["time"] - killed, last - started[at]["step"]


def wait(run: Run, ready: Any) -> list[dict[str, Any]]:
    """What the run has said as soon as that is enough."""
    while not ready(said := run.so_far()):
        assert run.is_alive(), run.end
        time.sleep(0.05)
    return said


def _step(said: list[dict[str, Any]]) -> int:
    return _last(said, "step")


def _saved(said: list[dict[str, Any]]) -> int:
    return _last(said, "checkpoint")


def _started(said: list[dict[str, Any]]) -> int:
    return _last(said, "start")


def _last(said: list[dict[str, Any]], name: str) -> int:
    return next((int(event["step"]) for event in reversed(said) if event["event"] == name), -1)


if __name__ == "__main__":
    main()
