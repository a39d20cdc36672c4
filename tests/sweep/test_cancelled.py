"""What a train task that is stopped says in MLflow of its sweep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow import Cluster, Node, tracking
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators.cancelled import end_with_dag_run
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.tracking.server import client

pytestmark = pytest.mark.slow

SETTINGS = SweepSettings(cluster=Cluster(Node("a", devices=1, kind="cpu")), group="sweep")


class Instance:
    """A train task's instance, of whose DAG run Airflow says what it is told to say."""

    dag_id, task_id, run_id, map_index = "dag", "sweep.train", "run", 0

    def __init__(self, run: str | None, report: str | None) -> None:
        self.run, self.report = run, report

    def get_dr_count(self, dag_id: str, run_ids: list[str], states: list[str] | None = None) -> int:
        return int(self.run is not None and (states is None or self.run in states))

    def get_task_states(self, **question: Any) -> dict[str, dict[str, Any]]:
        return {} if self.run is None else {self.run_id: {"sweep.report": self.report}}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.mark.parametrize(
    ("run", "report", "expected"),
    [
        ("running", None, "RUNNING"),
        ("failed", "upstream_failed", "KILLED"),
        ("success", "skipped", "KILLED"),
        (None, None, "KILLED"),
        # Somebody marked the train task alone, and the report was quicker than whoever stops that.
        ("success", "success", "FINISHED"),
        ("failed", "failed", "FINISHED"),
    ],
)
def test_a_sweep_is_stopped_with_its_dag_run_but_keeps_what_it_reported(
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    tmp_path: Path,
    run: str | None,
    report: str | None,
    expected: str,
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setattr("saturn_airflow.operators.cancelled.mlflow_uri", lambda conn_id: uri)
    context: Any = {"ti": Instance(run, report)}
    folder = SweepContext.of(context, "sweep").folder
    sweep = tracking.open_sweep(uri, "dag", "sweep", {"saturn.sweep": str(folder)}, {}, folder)
    if expected == "FINISHED":
        sweep.close("finished")
    job: Any = SimpleNamespace(description={"parent": sweep.to_dict()})
    said: list[Any] = []
    end_with_dag_run(context, SETTINGS, job, lambda *words: said.append(words))
    assert not said
    assert sweep.id is not None
    assert client(uri).get_run(sweep.id).info.status == expected
