"""What reaches people and their monitoring: missed deadlines, and numbers among Airflow's own."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference  # type: ignore[attr-defined]
from airflow.serialization.serialized_objects import DagSerialization
from any_job import ANY_JOB

from saturn_airflow import Cluster, InvalidSweepError, Node, SaturnSweepOperator
from saturn_airflow.operators import airflow_internals, deadline_watch, numbers_for_airflow
from saturn_airflow.operators.numbers_for_airflow import LeaseWait, tell_of_sweep

TOLD: list[Any] = []


def page(context: Any, deadline: dict[str, Any]) -> None:
    TOLD.append((context, deadline))


def sweep(**settings: Any) -> SaturnSweepOperator:
    alert = DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=timedelta(hours=6),
        callback=AsyncCallback("shop.alerts.page_from_the_triggerer"),
    )
    with DAG("late", deadline=alert) as dag:
        made = SaturnSweepOperator(
            task_id="sweep", jobs=[ANY_JOB], cluster=Cluster(Node("gpu-a", 2)), **settings
        )
    DagSerialization.to_dict(dag)
    return made


def test_the_function_reaches_the_plan_and_the_report_beside_airflows_own_deadline() -> None:
    late = {"objective": "device-time", "deadline": "06:00"}
    for rounds in (1, 2):
        for given in (page, f"{__name__}:page"):
            made = sweep(**late, rounds=rounds, on_missed_deadline=given)
            assert made.report.settings.on_missed_deadline == f"{__name__}:page"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_missed_deadline": page}, "on_missed_deadline needs a deadline"),
        (
            {"on_missed_deadline": lambda *_: None, "deadline": "06:00", "objective": "device-time"},
            "on_missed_deadline: a lambda",
        ),
    ],
)
def test_what_can_not_be_called_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        sweep(**settings)


def test_the_function_is_called_and_may_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("alerts_of_a_shop")
    module.page, module.broken = page, lambda context, deadline: 1 / 0  # type: ignore[attr-defined]
    module.exits = lambda context, deadline: sys.exit(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    TOLD.clear()
    context: Any = {"ti": "this"}
    deadline_watch.tell_author(None, context, {"at": 1.0})
    deadline_watch.tell_author("alerts_of_a_shop:page", context, {"at": 1.0, "late_seconds": 5.0})
    deadline_watch.tell_author("alerts_of_a_shop:broken", context, {"at": 1.0})
    deadline_watch.tell_author("alerts_of_a_shop:missing", context, {"at": 1.0})
    deadline_watch.tell_author("alerts_of_a_shop:exits", context, {"at": 1.0})
    assert [(context, {"at": 1.0, "late_seconds": 5.0})] == TOLD
    assert len([record for record in caplog.records if record.exc_info]) == 3


@pytest.fixture
def statsd(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, float, dict[str, str]]]:
    """What is told to Airflow's metrics."""
    told: list[tuple[str, str, float, dict[str, str]]] = []
    backend = SimpleNamespace(
        timing=lambda name, value, *, tags: told.append(("timing", name, value, tags)),
        gauge=lambda name, value, *, tags: told.append(("gauge", name, value, tags)),
    )
    stats = airflow_internals.stats()
    monkeypatch.setattr(sys.modules[stats.gauge.__module__], "_get_backend", lambda: backend)
    return told


def test_airflows_metrics_get_lease_waits_busy_devices_and_the_plans_error(
    statsd: list[tuple[str, str, float, dict[str, str]]],
) -> None:
    tags = {"dag_id": "d", "node": "gpu-a"}
    waits = LeaseWait(tags)
    for event, at in (("waiting", 10.0), ("waiting", 11.0), ("leased", 12.5), ("step", 13.0)):
        # The clock is set back by an hour as it waits.
        waits.hear({"event": event, "time": at - 3600 * (at > 11), "clock": 100 + at})
    LeaseWait(tags).hear({"event": "leased", "time": 1.0})
    whole = {"failed": [], "utilisation": 0.8, "planned_seconds": 10.0, "actual_seconds": 12.0}
    tell_of_sweep(whole, {"dag_id": "d"})
    lost = {"failed": ["a", "b"], "utilisation": 0.0, "planned_seconds": None, "actual_seconds": 0.0}
    tell_of_sweep(lost, {"dag_id": "e"})
    assert [(kind, name, round(value, 6), tags["dag_id"]) for kind, name, value, tags in statsd] == [
        ("timing", "saturn.lease_wait", 2500.0, "d"),
        ("timing", "saturn.lease_wait", 0.0, "d"),
        ("gauge", "saturn.jobs_failed", 0, "d"),
        ("gauge", "saturn.devices_busy", 0.8, "d"),
        ("gauge", "saturn.plan_error", 0.2, "d"),
        ("gauge", "saturn.jobs_failed", 2, "e"),
        ("gauge", "saturn.devices_busy", 0.0, "e"),
    ]


def test_metrics_that_have_moved_cost_no_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def moved() -> Any:
        raise ImportError("no module named airflow.sdk.observability")

    monkeypatch.setattr(airflow_internals, "stats", moved)
    tell_of_sweep({"failed": [], "utilisation": 0.8, "planned_seconds": None, "actual_seconds": 0.0}, {})
    assert "do not take saturn.devices_busy" in caplog.text


def test_the_names_in_the_docs_are_those_that_are_told() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    names = [value for name, value in vars(numbers_for_airflow).items() if name.isupper()]
    assert len(names) == 4
    assert all(f"| `{name}` |" in text for name in names)
