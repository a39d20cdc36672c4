"""What docs/daily.md says of assets and of Slack: run as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Asset, BaseNotifier, dag
from jinja2 import Environment

from saturn_airflow import Cluster, Job, Node, SaturnSweepOperator

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "daily.md").read_text(), re.DOTALL)


def block(of: str) -> str:
    (found,) = (one for one in BLOCKS if of in one)
    return found  # type: ignore[no-any-return]


def sweep(**arguments: Any) -> SaturnSweepOperator:
    made: list[SaturnSweepOperator] = []

    @dag(dag_id="warm_start", schedule=None)
    def night() -> None:
        jobs = [Job("a", load_model="m:f", load_dataloader="m:g")]
        cluster = Cluster(Node("local", devices=1, kind="cpu"))
        made.append(SaturnSweepOperator(task_id="sweep", jobs=jobs, cluster=cluster, **arguments))

    night()
    return made[0]


@pytest.fixture(autouse=True)
def _jobs_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "check_references", lambda job: None)


def test_the_asset_that_the_docs_wait_for_is_the_sweeps() -> None:
    code: dict[str, Any] = {}
    exec(block("def after_the_night"), code)
    assert isinstance(code["NIGHTLY"], Asset)
    assert code["NIGHTLY"] in sweep().report.outlets


def test_slack_is_told_of_good_and_of_bad_nights(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlackWebhookNotifier(BaseNotifier):
        template_fields = ("text",)

        def __init__(self, slack_webhook_conn_id: str, text: str) -> None:
            super().__init__()
            self.text = text

        def notify(self, context: Any) -> None:
            """Nobody is told."""

    provider = types.ModuleType("airflow.providers.slack.notifications.slack_webhook")
    provider.SlackWebhookNotifier = SlackWebhookNotifier  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, provider.__name__, provider)
    code: dict[str, Any] = {}
    exec(block("SlackWebhookNotifier"), code)
    report = sweep(
        report_args={"on_success_callback": code["TELL"], "on_failure_callback": code["TELL"]}
    ).report
    assert code["TELL"] in [*report.on_success_callback, *report.on_failure_callback]

    def said(result: Any) -> str:
        ti = types.SimpleNamespace(
            dag_id="warm_start", task_id="sweep.report", xcom_pull=lambda task_ids: result
        )
        return Environment().from_string(code["TEXT"]).render(ti=ti)

    best = {"job": "a", "metric": "eval_loss", "value": 0.41054}
    good = {
        "jobs": [1, 2],
        "failed": [],
        "best": best,
        "champion": {"beaten_by": 0.02},
        "mlflow_url": "http://m",
    }
    assert said(good) == (
        "warm_start: 2 jobs, 0 failed. Best: a, eval_loss 0.4105. +0.02 against the champion. http://m"
    )
    assert said({"jobs": [1], "failed": ["a"], "best": None}) == "warm_start: 1 jobs, 1 failed (a)."
    assert said(None) == "warm_start: 0 jobs, 0 failed."
