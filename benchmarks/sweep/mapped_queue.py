"""The jobs without a sweep: a mapped task of Airflow for each, as many at once as there are slots."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from airflow.sdk import dag, task
from measured_jobs import NODE


@dag(schedule=None, catchup=False)
def mapped_queue() -> None:
    @task
    def specs() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(Path(os.environ["MAPPED_QUEUE"]).read_text())
        return found

    @task(max_active_tis_per_dagrun=NODE.devices)
    def train(spec: dict[str, Any]) -> None:
        from saturn_airflow.launch import runs

        end = runs.start(runs.RunSpec.from_dict(spec)).wait()
        if end["status"] != "finished":
            raise RuntimeError(f"{end['status']}: {end['reason']}\n{end['traceback']}")

    train.expand(spec=specs())


mapped_queue()
