"""The example sweep of the deployment trains on all its nodes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.services, pytest.mark.ranks, pytest.mark.timeout(1800)]


def test_the_nightly_sweep_trains_on_both_nodes(cluster: Any) -> None:
    run = cluster.trigger("nightly_on_cluster")
    state = cluster.wait("nightly_on_cluster", run, timeout=1500)
    assert state == "success", cluster.states("nightly_on_cluster", run)
    result = cluster.airflow.xcom("nightly_on_cluster", run, "sweep.report")
    assert {job["node"] for job in result["jobs"]} == {"gpu-a", "gpu-b"}
    assert [job["status"] for job in result["jobs"]] == ["finished"] * 6
