"""The DAG of benchmarks/sweep.py: its jobs as a sweep with all of Saturn's defaults."""

from __future__ import annotations

from airflow.sdk import dag
from measured_jobs import CLUSTER, JOBS

from saturn_airflow import SaturnSweepOperator


@dag(schedule=None, catchup=False)
def measured_sweep() -> None:
    SaturnSweepOperator(task_id="sweep", jobs=JOBS, cluster=CLUSTER)


measured_sweep()
