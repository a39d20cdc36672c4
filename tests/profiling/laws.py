"""Jobs whose speed follows a law that is known, so that what is measured in waves can be held against it."""

from __future__ import annotations

import math
from typing import Any

from saturn_airflow import BaseTechnique, Cluster, HParams, Job, Node, library
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.planning import solve
from saturn_airflow.profiling.knowledge import Knowledge


class Law(BaseTechnique):
    """A technique that runs on any number of devices."""


class Frugal(BaseTechnique):
    """One that gives speed for memory, on one device."""

    def why_not(self, job: Job, devices: int) -> str | None:
        return None if devices == 1 else "frugal uses one device"

    def spares_memory(self, parameters: Any) -> bool:
        return True


class Wide(BaseTechnique):
    """One that needs several devices."""

    def why_not(self, job: Job, devices: int) -> str | None:
        return "wide needs two devices" if devices < 2 else None


TECHNIQUES = {"even": Law, "frugal": Frugal, "wide": Wide}
#: Seconds on one device, the share that does not get faster, seconds of each doubling.
CURVES = {"even": (1.0, 0.06, 0.004), "frugal": (1.6, 0.0, 0.0), "wide": (1.1, 0.01, 0.002)}


def register() -> None:
    for name, technique in TECHNIQUES.items():
        library.register(name, technique)


def seconds(size: float, technique: str, devices: int) -> float:
    one, serial, message = CURVES[technique]
    return size * one * (serial + (1 - serial) / devices) + message * math.log2(devices)


def job(number: int, size: float, batches: int, **fields: Any) -> Job:
    return Job(
        f"j{number}",
        "m:model",
        "d:data",
        model_args={"size": size},
        hparams=HParams(batches=batches, lr=0.001 * (number + 1)),
        **fields,
    )


def cluster(*devices: int) -> Cluster:
    return Cluster(*(Node(f"n{i}", count, kind="cpu") for i, count in enumerate(devices)))


def measure(key: Key, knowledge: Knowledge, **changes: Any) -> Estimate:
    """What a trial would find."""
    one = next(iter(knowledge.strategies[key].jobs.values()))
    found: dict[str, Any] = {
        "launch_seconds": 3.0,
        "setup_seconds": 0.2,
        "seconds_per_batch": seconds(float(one.model_args["size"]), key.technique, key.devices),
        "batches": 5,
        "batches_per_epoch": 50,
    }
    return Estimate(**key._asdict(), **{**found, **changes})


def plan(problem: Problem) -> Plan:
    return solve(problem, time_limit=1.0, gap=0.01)
