"""Sweeps with more tasks than a node has slots, for longer than Airflow leaves a task in a queue."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.timeout(1800)]


def test_no_task_dies_in_a_queue(cluster: Any) -> None:
    """Fifteen jobs of 12 s wait for two devices; tasks that are queued for 25 s are lost (`cluster`)."""
    run_id = cluster.trigger("crowd")
    state = cluster.wait("crowd", run_id, timeout=800)
    tasks = [t for t in cluster.airflow.tasks("crowd", run_id) if t["state"] != "skipped"]
    assert state == "success", cluster.states("crowd", run_id)
    assert {t["try_number"] for t in tasks} == {1}
    on_node = [t for t in tasks if t["queue"] == "saturn.gpu-a"]
    assert {t["pool"] for t in on_node} == {"saturn.gpu-a"}
    begin = min(datetime.fromisoformat(t["start_date"]) for t in on_node)
    ends = [datetime.fromisoformat(t["start_date"]) for t in on_node]
    assert (max(ends) - begin).total_seconds() > 60, "tasks had to wait for longer than a queue lets them"
