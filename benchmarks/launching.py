"""How long training takes to start, to hand its devices on, and to die: `python benchmarks/launching.py`.

Ranks from launch to their first all-reduce; a real run from its start to its first step, with the machine to
itself and after it waited for a device; and from a SIGKILL until no process of a run is left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import describe

from saturn_airflow import HParams, Job
from saturn_airflow.launch import runs
from saturn_airflow.launch.runs import Run, RunSpec
from saturn_airflow.training import ranks
from saturn_airflow.training.ranks import Ranks

DAGS = str(Path(__file__).resolve().parents[1] / "dags")
JOB = Job(
    "gpt2",
    load_model="shop.models:gpt2",
    load_dataloader="shop.data:python_text",
    loss_function="shop.models:lm_loss",
    hparams=HParams(epochs=1000, batch_size=16),
)


def meet(ranks: Ranks) -> float:
    """The time at which all ranks have met."""
    ranks.barrier()
    return time.monotonic()


def first_all_reduce(size: int) -> float:
    """Seconds from launching ranks to their first all-reduce."""
    started = time.monotonic()
    return float(max(ranks.launch("launching:meet", size=size))) - started


def spec(folder: str, name: str, devices: int = 2) -> RunSpec:
    """A real training on two CPU slots, under DDP where it takes both."""
    return RunSpec(
        job=JOB,
        technique="ddp" if devices == 2 else "single",
        folder=f"{folder}/{name}",
        node="benchmark",
        kind="cpu",
        slots=2,
        devices=devices,
        device_ids=tuple(range(devices)),
        path=(DAGS,),
        leases_folder=f"{folder}/leases",
    )


def until(run: Run, name: str) -> float:
    """Follow a run until an event, and tell its time."""
    for event in run.events(poll=0.01):
        if event["event"] == name:
            return float(event["time"])
    raise RuntimeError(run.log.read_text())


def run_times(folder: str, repeat: int) -> dict[str, float]:
    """Seconds of the phases of two runs that follow each other on the same devices."""
    begun = time.time()
    first = runs.start(spec(folder, f"first-{repeat}"))
    leased, step = until(first, "leased"), until(first, "step")
    second = runs.start(spec(folder, f"second-{repeat}"))
    until(second, "waiting")
    time.sleep(5)
    first.stop()
    ended = time.time()
    handed_on, next_step = until(second, "leased"), until(second, "step")
    processes = [psutil.Process(int((second.folder / "alive").read_text()))]
    processes += processes[0].children(recursive=True)
    killed = time.time()
    processes[0].kill()
    psutil.wait_procs(processes, timeout=30)
    return {
        "start to devices": leased - begun,
        "devices to first step": step - leased,
        "end of one run to the next one's devices": handed_on - ended,
        "devices to first step, after waiting": next_step - handed_on,
        "supervisor killed to all processes gone": time.time() - killed,
        "starter killed to all processes gone": starter_killed(folder, repeat),
    }


def starter_killed(folder: str, repeat: int) -> float:
    """Seconds from killing the process that started a run until nothing of the run is left."""
    code = (
        "import launching, sys; from saturn_airflow.training import runs;"
        "run = runs.start(launching.spec(sys.argv[1], sys.argv[2]));"
        "[print(event['event'], run.folder, flush=True) for event in run.events()]"
    )
    command = [sys.executable, "-c", code, folder, f"orphan-{repeat}"]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert starter.stdout is not None
    run_folder = Path(next(line.split()[1] for line in starter.stdout if line.startswith("step")))
    supervisor = psutil.Process(int((run_folder / "alive").read_text()))
    processes = [supervisor, *supervisor.children(recursive=True)]
    starter.kill()
    killed = time.time()
    psutil.wait_procs(processes, timeout=30)
    starter.wait()
    return time.time() - killed


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    figures: dict[str, Any] = {"first launch, 1 rank": first_all_reduce(1)}
    for size in (1, 2, 4):
        figures[f"{size} ranks to first all-reduce"] = statistics.median(
            first_all_reduce(size) for _ in range(5)
        )
    with tempfile.TemporaryDirectory() as folder:
        rounds = [run_times(folder, repeat) for repeat in range(args.repeats)]
    figures |= {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    for name, seconds in figures.items():
        print(f"{seconds:8.2f} s  {name}")
    if args.out:
        seconds = {name: round(value, 3) for name, value in figures.items()}
        args.out.write_text(json.dumps({"machine": describe(), "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
