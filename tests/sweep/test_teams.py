"""What a deployment lets the sweeps of its teams ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator
from saturn_airflow.commands import command_line
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.teams import Teams
from saturn_airflow.operators import context, plan_task

CLUSTER = Cluster(Node("local", devices=2, kind="cpu"))


@pytest.fixture(autouse=True)
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__SATURN__CHECK_REFERENCES", "False")
    monkeypatch.setenv("AIRFLOW__SATURN__SHARES", "vision: 0.5, text: 0.25")
    monkeypatch.setenv("AIRFLOW__SATURN__PRIORITIES", "vision: 10, *: 0")


def sweep(**arguments: object) -> SaturnSweepOperator:
    job = Job(
        "only", "small_jobs:linear", "small_jobs:noise", "small_jobs:squared", hparams=HParams(batches=5)
    )
    with DAG("nightly"):
        return SaturnSweepOperator(task_id="sweep", jobs=[job], cluster=CLUSTER, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"team": "vision", "priority": 11}, r"priority is 11, .* lets team 'vision' have 10 at the most"),
        ({"team": "text", "priority": 1}, r"priority is 1, .* lets team 'text' have 0 at the most"),
        ({"priority": 0.5}, r"priority is 0.5, .* lets a sweep of no team have 0 at the most"),
        ({"team": "visoin"}, r"team is 'visoin', which neither .* did you mean 'vision'\?"),
        ({"team": "*"}, r"team is '\*', .* they name text, vision"),
        ({"team": 3}, "team is 3; give a name"),
    ],
)
def test_what_a_dag_may_not_have_is_refused_when_it_is_parsed_and_when_it_is_planned(
    asked: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidSweepError, match=f"^sweep 'sweep': {message}"):
        sweep(**asked)
    if isinstance(asked.get("team", ""), str):
        with pytest.raises(AirflowFailException, match=f"^{message}"):
            plan_task.check_team(SweepSettings(cluster=CLUSTER, **asked))  # type: ignore[arg-type]


def test_what_it_may_have_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ({"team": "vision", "priority": 10}, {"team": "text", "priority": -5}, {}):
        sweep(**asked)
        plan_task.check_team(SweepSettings(cluster=CLUSTER, **asked))  # type: ignore[arg-type]
    for name in ("SHARES", "PRIORITIES"):
        monkeypatch.delenv(f"AIRFLOW__SATURN__{name}")
    sweep(team="anybody", priority=1e9)
    assert Teams.parse(" a : 0.5 ,, ", "*: 3") == Teams({"a": 0.5}, {"*": 3.0})


@pytest.mark.parametrize(
    ("shares", "priorities", "message"),
    [
        ("vision", "", r"\[saturn\] shares is 'vision'; 'vision' is not as in 'vision: 0.5, text: 0.3'"),
        ("vision: 2", "", "'vision: 2' is not as in"),
        ("vision: 0.5, text: -1", "", "'text: -1' is not as in"),
        ("a: 0.6, b: 0.6", "", "together they are at most 1"),
        ("a: 0.1, a: 0.2", "", "names 'a' twice"),
        ("", "a: high", r"\[saturn\] priorities is 'a: high'; 'a: high' is not as in 'vision: 10, \*: 0'"),
        ("", "a: nan", "'a: nan' is not as in"),
    ],
)
def test_settings_that_cannot_be_are_told_by_name(
    shares: str, priorities: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        Teams.parse(shares, priorities)
    monkeypatch.setenv("AIRFLOW__SATURN__SHARES", shares)
    monkeypatch.setenv("AIRFLOW__SATURN__PRIORITIES", priorities)
    with pytest.raises(InvalidSweepError, match=message):
        sweep()
    with pytest.raises(AirflowFailException, match=message):
        plan_task.check_team(SweepSettings(cluster=CLUSTER))
    assert context.sharing_rules().shares == {}, "what trains already goes on"


def test_all_take_turns_by_the_deployments_shares() -> None:
    assert (
        context.sharing_rules().shares == command_line.sharing_rules().shares == {"vision": 0.5, "text": 0.25}
    )
