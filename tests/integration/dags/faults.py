"""Sweeps that are slow enough to be disturbed."""

from __future__ import annotations

from typing import Any

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, Rounds, SaturnSweepOperator

A, B, Z = (Node(name, devices=2, kind="cpu") for name in ("gpu-a", "gpu-b", "gpu-z"))


def job(name: str, batches: int, nodes: list[str] | None = None, **settings: Any) -> Job:
    hparams = HParams(batches=batches, batch_size=8, lr=0.01)
    return Job(
        name,
        "slow_jobs:linear",
        "slow_jobs:points",
        "slow_jobs:loss",
        hparams=hparams,
        nodes=nodes,
        **settings,
    )


def long_job(name: str, batches: int, nodes: list[str] | None = None) -> Job:
    """One that takes minutes, until the test lets it go on at full speed: `Watched.hurry`."""
    return job(name, batches, nodes, data_args={"until": f"hurry-{name}"}, neutral=["until"])


def sweep(jobs: list[Job], *nodes: Node, **settings: Any) -> SaturnSweepOperator:
    return SaturnSweepOperator(
        task_id="sweep",
        jobs=jobs,
        cluster=Cluster(*nodes) if nodes else None,
        techniques=["single"],
        checkpoint_every=2,
        planning_seconds=1,
        **settings,
    )


@dag(schedule=None)
def nightly() -> None:
    """Shares its nodes with ``weekly``."""
    sweep([job(f"n{i}", 20 + 10 * i) for i in range(4)], A, B)


@dag(schedule=None)
def weekly() -> None:
    """Shares its nodes with ``nightly``."""
    sweep([job(f"w{i}", 25 + 10 * i) for i in range(4)], A, B)


@dag(schedule=None)
def outages() -> None:
    """A job on each node that trains while the services around it fail. Its nodes are the deployment's."""
    sweep([long_job("on-a", 4000, ["gpu-a"]), long_job("on-b", 4000, ["gpu-b"])])


@dag(schedule=None)
def mishaps() -> None:
    """Jobs on one node that each meet with something."""
    disturbed = ("rank-killed", "cleared", "failed", "full-disk")
    jobs = [long_job("undisturbed", 100), *(long_job(name, 2000) for name in disturbed)]
    sweep(jobs, A, allowed_failures=1)


@dag(schedule=None)
def lost_node() -> None:
    """One job on a node that goes for good, and one elsewhere."""
    sweep([job("stranded", 3000, ["gpu-b"]), job("elsewhere", 20, ["gpu-a"])], A, B, allowed_failures=1)


@dag(schedule=None)
def lost_and_moved() -> None:
    """The same with jobs that may go elsewhere. One of the two there waits for the device of ``stranded``."""
    jobs = [job(f"stays-{i}", 150, ["gpu-a"]) for i in (1, 2)] + [job(f"moves-{i}", 200) for i in (1, 2)]
    sweep(jobs, A, B)


@dag(schedule=None)
def drained() -> None:
    """A job that leaves the node it trains on, which is drained, for the other one."""
    sweep([long_job("leaves", 2000)], A, B, rounds=Rounds(most=2, every_minutes=60))


@dag(schedule=None)
def deaf_node() -> None:
    """One of its nodes has no worker."""
    jobs = [job("anywhere", 5), job("there", 5, ["gpu-z"])]
    sweep(jobs, A, Z, allowed_failures=1)


@dag(schedule=None)
def deaf_node_fails() -> None:
    """The same, and it is not to be left out."""
    sweep([job("nowhere", 5)], A, Z, on_missing_node="fail")


nightly()
weekly()
outages()
mishaps()
lost_node()
lost_and_moved()
drained()
deaf_node()
deaf_node_fails()
