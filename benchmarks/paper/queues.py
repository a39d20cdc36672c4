"""How sweeps are run without a planner: as devices come free, one job after another as they are written."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from saturn_airflow import Job
from saturn_airflow.launch import runs

TECHNIQUES = str(Path(__file__).parent / "techniques")
BATCHES = 40


class Fastest(NamedTuple):
    """The fastest technique on a number of devices; ``seconds`` are of the whole job."""

    seconds: float
    technique: str


@dataclass(frozen=True)
class Emulated:
    """A job of a case: by number of devices, what is fastest there; where it does not fit, nothing."""

    name: str
    fastest: Mapping[int, Fastest]

    def job(self) -> Job:
        """It as a job of Saturn's."""
        law = [[found.technique, devices, found.seconds / BATCHES] for devices, found in self.fastest.items()]
        return Job.from_dict(
            {
                "name": self.name,
                **dict.fromkeys(("load_model", "load_dataloader", "loss_function"), "emulated_sweep:nothing"),
                "model_args": {"law": law},
                "hparams": {"batches": BATCHES},
            }
        )

    def width(self, wanted: int) -> int:
        """The devices that it gets where each is to have ``wanted``: more where it does not fit on these."""
        return min((count for count in self.fastest if count >= wanted), default=max(self.fastest))


def expected(jobs: Sequence[Emulated], wanted: int | None, nodes: Sequence[int]) -> float:
    """Seconds that a queue takes if nothing but training does; its parameters as those of :func:`run`."""
    free, ends, now = list(nodes), list[tuple[float, int, int]](), 0.0
    for job in jobs:
        while (place := _place(job, wanted, free, nodes)) is None:
            now, node, devices = heapq.heappop(ends)
            free[node] += devices
        node, devices = place
        free[node] -= devices
        heapq.heappush(ends, (now + job.fastest[devices].seconds, node, devices))
    return max(end for end, _, _ in ends)


def run(jobs: Sequence[Emulated], wanted: int | None, nodes: Sequence[int], folder: Path) -> float:
    """Run a queue with Saturn's own processes and device locks, but without Airflow, plans and MLflow.

    :param wanted: devices of each job, or more where it does not fit on these; None for a whole node.
    :param nodes: their devices.
    :returns: seconds from the start to the end of the last job.
    """
    free, changed = list(nodes), threading.Condition()

    def train(job: Emulated, node: int, devices: int) -> None:
        try:
            end = runs.start(_spec(job, node, devices, nodes[node], folder)).wait()
            assert end["status"] == "finished", end
        finally:
            with changed:
                free[node] += devices
                changed.notify()

    began = time.time()
    with ThreadPoolExecutor(sum(nodes)) as pool:
        trained = []
        for job in jobs:
            with changed:
                while (place := _place(job, wanted, free, nodes)) is None:
                    changed.wait()
                free[place[0]] -= place[1]
            trained.append(pool.submit(train, job, *place))
    for each in trained:
        each.result()
    return time.time() - began


def _place(
    job: Emulated, wanted: int | None, free: Sequence[int], nodes: Sequence[int]
) -> tuple[int, int] | None:
    """A job's node and devices now: the node with just enough room, or of whole nodes the largest."""
    if wanted is None:
        idle = [(room, node) for node, room in enumerate(free) if room == nodes[node] and room in job.fastest]
        if not idle:
            return None
        room, node = max(idle)
        return node, room
    devices = job.width(wanted)
    fits = [(room, node) for node, room in enumerate(free) if room >= devices]
    return (min(fits)[1], devices) if fits else None


def _spec(job: Emulated, node: int, devices: int, slots: int, folder: Path) -> runs.RunSpec:
    found = job.fastest[devices]
    return runs.RunSpec(
        job=job.job(),
        technique="emulated",
        parameters={"under": found.technique, "seconds": found.seconds / BATCHES},
        devices=devices,
        folder=str(folder / job.name),
        node=f"node{node:02}",
        kind="cpu",
        slots=slots,
        leases_folder=str(folder / f"leases-{node}"),
        technique_folders=(TECHNIQUES,),
        path=(str(Path(__file__).parent),),
    )
