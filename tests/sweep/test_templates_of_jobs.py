"""Templates in jobs' texts, and DAG runs that lack what they name."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG

from saturn_airflow import Cluster, InvalidSweepError, Job, Node, SaturnSweepOperator

NIGHT = datetime(2026, 11, 20, tzinfo=timezone.utc)


def trials(day: str) -> Any:
    job = Job(
        "a",
        "torch.nn:Linear",
        "torch.utils.data:DataLoader",
        "torch.nn.functional:mse_loss",
        model_args={"in_features": 1, "out_features": 1},
        data_args={"dataset": day},
    )
    with DAG("nightly") as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[job], cluster=Cluster(Node("n", 1)))
    return dag.get_task("sweep.trials")


def context(date: datetime | None, **more: Any) -> Any:
    return {"dag_run": SimpleNamespace(logical_date=date, run_after=NIGHT), **more}


def test_a_run_without_a_logical_date_is_told_what_to_write() -> None:
    with pytest.raises(
        InvalidSweepError, match=r"'ds' is undefined; .* \{\{ dag_run.run_after \| ds \}\}"
    ) as told:
        trials("{{ ds }}").render_template_fields(context(None))
    assert "--logical-date" in str(told.value)
    task = trials("{{ dag_run.run_after | ds }}")
    task.render_template_fields(context(None))
    assert "2026-11-20" in str(task.jobs)


def test_what_no_run_has_is_told_without_a_date() -> None:
    with pytest.raises(InvalidSweepError, match=r"can't be rendered: 'dday' is undefined$"):
        trials("{{ dday }}").render_template_fields(context(NIGHT, ds="2026-11-20"))
