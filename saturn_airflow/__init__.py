"""Saturn for Airflow: train many models at once, each under the parallelism that is best for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saturn_airflow.cluster import Cluster, Node
from saturn_airflow.errors import InvalidSweepError, JobError, SaturnError
from saturn_airflow.jobs import HParams, Job, grid
from saturn_airflow.library import BaseTechnique, register
from saturn_airflow.rounds import Rounds
from saturn_airflow.selection import MedianStopping, SuccessiveHalving

if TYPE_CHECKING:
    from saturn_airflow.sweep import SaturnSweepOperator

__version__ = "0.1.0"
__all__ = [
    "BaseTechnique",
    "Cluster",
    "HParams",
    "InvalidSweepError",
    "Job",
    "JobError",
    "MedianStopping",
    "Node",
    "Rounds",
    "SaturnError",
    "SaturnSweepOperator",
    "SuccessiveHalving",
    "grid",
    "register",
]


def __getattr__(name: str) -> Any:
    # The rooms below the rim run where Airflow is not installed.
    if name == "SaturnSweepOperator":
        from saturn_airflow.sweep import SaturnSweepOperator

        return SaturnSweepOperator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
