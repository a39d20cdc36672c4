"""The deployment of the compose file runs sweeps, and comes back after faults."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.services, pytest.mark.ranks, pytest.mark.timeout(600)]


def test_a_sweep_trains_on_both_nodes(cluster):
    run = cluster.trigger("over_both_nodes")
    assert cluster.wait("over_both_nodes", run) == "success", cluster.states("over_both_nodes", run)
    result = cluster.airflow.xcom("over_both_nodes", run, "sweep.report")
    assert {job["node"] for job in result["jobs"]} == {"gpu-a", "gpu-b"}
    assert [job["status"] for job in result["jobs"]] == ["finished"] * 4
