"""Saturn for Airflow: train many models at once, each under the parallelism that is best for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saturn_airflow.launch.job_log import current_step
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.library import BaseTechnique, register
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.early_stopping import EarlyStopping
from saturn_airflow.model.errors import InvalidSweepError, JobError, SaturnError
from saturn_airflow.model.grids import grid
from saturn_airflow.model.hparams import HParams
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.sampling import loguniform, randint, sample, uniform
from saturn_airflow.model.secrets import Secret
from saturn_airflow.model.selection import MedianStopping, SuccessiveHalving
from saturn_airflow.moved import understand_old_names

if TYPE_CHECKING:
    from saturn_airflow.operators.sweep import SaturnSweepOperator

__version__ = "0.2.0.dev0"
__all__ = [
    "BaseTechnique",
    "Cluster",
    "DoesNotFit",
    "EarlyStopping",
    "HParams",
    "InvalidSweepError",
    "Job",
    "JobError",
    "MedianStopping",
    "Node",
    "Rounds",
    "SaturnError",
    "SaturnSweepOperator",
    "Secret",
    "SuccessiveHalving",
    "current_step",
    "grid",
    "loguniform",
    "randint",
    "register",
    "sample",
    "uniform",
]

understand_old_names()


def __getattr__(name: str) -> Any:
    # All but the tasks and pages runs where Airflow is not installed.
    if name == "SaturnSweepOperator":
        from saturn_airflow.operators.sweep import SaturnSweepOperator

        return SaturnSweepOperator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
