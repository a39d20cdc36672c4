"""The DAG of benchmarks/paper.py: the jobs of a case, as a sweep with all of Saturn's defaults."""

from __future__ import annotations

import json
import os
from pathlib import Path

from airflow.sdk import dag

from saturn_airflow import Job, SaturnSweepOperator


def nothing(**arguments: object) -> None:
    """What jobs refer to that load nothing."""


CASE = Path(os.environ.get("PAPER_CASE", ""))

if CASE.is_file():

    @dag(schedule=None, catchup=False)
    def emulated_sweep() -> None:
        jobs = [Job.from_dict(job) for job in json.loads(CASE.read_text())]
        SaturnSweepOperator(task_id="sweep", jobs=jobs, techniques=["emulated"])

    emulated_sweep()
