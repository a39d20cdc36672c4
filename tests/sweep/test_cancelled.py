"""What a train task that is stopped says in MLflow of its sweep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow import Cluster, Node, tracking
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.sharing import SharedSweep
from saturn_airflow.operators.cancelled import _RENAMED, end_earlier, end_with_dag_run
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


def test_a_sweep_that_was_renamed_as_it_ran_is_ended_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, uri: str, tmp_path: Path
) -> None:
    """Its tasks are gone with its name, and the DAG run goes on: nobody else would."""
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    context: Any = {"ti": Instance("running", None)}
    sweeps = [SweepContext.of(context, group) for group in ("sweep", "renamed", "sweep_2")]
    opened = [
        tracking.open_sweep(
            uri, "renamed", one.key, {"saturn.sweep": one.key, "airflow.run_id": "run"}, {}, one.folder
        )
        for one in sweeps
    ]
    job = tracking.open_job(uri, opened[0], "a", {}, {}, sweeps[0].job_folder("a"))
    assert job.leave()
    facts = [SharedSweep(one.key, (), 1.0, 1.0) for one in sweeps]
    for one, sweep in zip(sweeps, facts, strict=True):
        Ledger(tmp_path).write(
            ActiveSweep(
                dag_id="dag",
                run_id="run",
                folder=str(one.folder.relative_to(tmp_path)),
                made=1.0,
                nodes=(),
                sweep=sweep,
            )
        )
    tasks = ["renamed.trials", "renamed.report", "sweep_2.trials", "other"]
    said: list[Any] = []
    end_earlier(context, uri, "renamed", tasks, lambda *words: said.append(words))
    ids = [str(one.id) for one in (*opened, job)]
    assert [client(uri).get_run(one).info.status for one in ids] == ["KILLED", "RUNNING", "RUNNING", "KILLED"]
    assert [one.key for one in Ledger(tmp_path).sweeps()] == ["dag/run/renamed", "dag/run/sweep_2"]
    assert said == [("%s is ended in MLflow: %s", "dag/run/sweep", _RENAMED)]
