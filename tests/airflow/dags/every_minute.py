"""A DAG whose schedule asks for a run as soon as it is unpaused."""

from __future__ import annotations

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import dag


@dag(schedule="* * * * *", catchup=False, max_active_runs=1, tags=["test"])
def every_minute():
    EmptyOperator(task_id="nothing")


every_minute()
