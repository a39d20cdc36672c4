"""What starting a job costs on one node, without Airflow: `python benchmarks/starting.py`.

Jobs of a few milliseconds of training wait in line for one CPU device, all at once. From one job's last batch
to the next one's first batch, by phase; the CPU seconds of a run, its processes and their memory. The trained
part is next to nothing, so what is left is Saturn's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from machine import describe
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from saturn_airflow import HParams, Job
from saturn_airflow.launch import runs
from saturn_airflow.launch.runs import Run, RunSpec

HERE = Path(__file__).resolve().parent
TICKS = os.sysconf("SC_CLK_TCK")


def model() -> nn.Module:
    """One layer."""
    return nn.Linear(8, 1)


def data() -> DataLoader[Any]:
    """Twenty batches of noise."""
    inputs = torch.randn(160, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The squared error; it takes 0.05 s, so that there is time to look at the processes."""
    time.sleep(0.05)
    return nn.functional.mse_loss(output, target)


def spec(folder: str, number: int) -> RunSpec:
    """One job that trains for twenty batches under ``single``."""
    job = Job(
        f"job-{number}",
        load_model="starting:model",
        load_dataloader="starting:data",
        loss_function="starting:loss",
        hparams=HParams(batches=20, batch_size=8),
    )
    return RunSpec(
        job=job,
        technique="single",
        folder=f"{folder}/{job.name}",
        node="benchmark",
        kind="cpu",
        slots=2,
        devices=1,
        device_ids=(0,),
        path=(str(HERE),),
        priority=(0.0, number),
        leases_folder=f"{folder}/leases",
        verdict="exact",
    )


class Watched:
    """A run whose processes are looked at while it is there."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cpu_seconds = 0.0
        self.processes: dict[str, int] = {}
        self.pss_mib: dict[str, float] = {}

    def look(self) -> None:
        """Note what it uses now."""
        with contextlib.suppress(OSError, ValueError, psutil.Error, IndexError):
            supervisor = psutil.Process(int((self.run.folder / "alive").read_text()))
            self.cpu_seconds = max(self.cpu_seconds, sum(supervisor.cpu_times()[:4]))
            said = {event["event"] for event in self.run.so_far()}
            state = "trains" if "step" in said else "waits" if "leased" not in said else ""
            if state and state not in self.pss_mib and "end" not in said:
                family = [supervisor.parents()[0], supervisor, *supervisor.children(recursive=True)]
                self.processes[state] = len(family)
                self.pss_mib[state] = sum(process.memory_full_info().pss for process in family) / 2**20


def in_line(folder: str, count: int) -> dict[str, Any]:
    """Figures of ``count`` runs that follow each other on one device."""
    runs.start(spec(folder, 0)).wait()  # the server is there and warm
    watched = [Watched(runs.start(spec(folder, number))) for number in range(1, count + 1)]
    while any(one.run.is_alive() for one in watched):
        for one in watched:
            if one.run.is_alive():
                one.look()
        time.sleep(0.02)
    phases: dict[str, list[float]] = {}
    for before, after in pairwise(map(times, watched)):
        spans = {
            "last batch to end": before["end"] - before["last step"],
            "end to the next lease": after["leased"] - before["end"],
            "lease to launched": after["launched"] - after["leased"],
            "launched to start": after["start"] - after["launched"],
            "start to first batch's end": after["first step"] - after["start"],
            "last batch to next start": after["start"] - before["last step"],
        }
        for name, seconds in spans.items():
            phases.setdefault(name, []).append(seconds)
    return {
        "seconds": {name: spread(seconds) for name, seconds in phases.items()},
        "cpu_seconds_of_a_run": round(statistics.mean(one.cpu_seconds for one in watched), 3),
        "processes": most(one.processes for one in watched),
        "pss_mib": median(one.pss_mib for one in watched),
    }


def times(one: Watched) -> dict[str, float]:
    """When a run came where, in seconds since the epoch."""
    events = one.run.so_far()
    assert events[-1]["status"] == "finished", events[-1]
    steps = [event["time"] for event in events if event["event"] == "step"]
    said = {event["event"]: event["time"] for event in events}
    return {**said, "first step": steps[0], "last step": steps[-1]}


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(seconds)
    p95 = ordered[round(0.95 * (len(ordered) - 1))]
    return {"median": round(statistics.median(ordered), 3), "p95": round(p95, 3)}


def most(looks: Any) -> dict[str, int]:
    """The most of each kind that was seen."""
    found: dict[str, int] = {}
    for look in looks:
        for state, number in look.items():
            found[state] = max(found.get(state, 0), number)
    return found


def median(looks: Any) -> dict[str, float]:
    """The median of each kind."""
    found: dict[str, list[float]] = {}
    for look in looks:
        for state, number in look.items():
            found.setdefault(state, []).append(number)
    return {state: round(statistics.median(numbers), 1) for state, numbers in found.items()}


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20, help="jobs in line (%(default)s)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    results: dict[str, Any] = {"machine": describe(), "load_average_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="saturn-starting-", ignore_cleanup_errors=True) as folder:
        results["in_line"] = in_line(folder, args.jobs)
    print(json.dumps(results, indent=2))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
