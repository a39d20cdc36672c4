"""The example of daily retraining, two nights of it: the second starts from what the first registered."""

from __future__ import annotations

import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nights(deployment):
    """The results of two nights."""
    results = []
    for _ in range(2):
        run_id = deployment.start("warm_start")
        assert deployment.wait("warm_start", run_id, 400) == "success"
        results.append(deployment.airflow.xcom("warm_start", run_id, "sweep.report"))
    return results


def test_the_second_night_starts_from_the_first_nights_champion(deployment, nights):
    client = MlflowClient(deployment.services.mlflow_url)
    came_from = [
        {client.get_run(job["run_id"]).data.params["init_from"] for job in night["jobs"]} for night in nights
    ]
    assert came_from == [{"scratch"}, {"models:/digits_daily/1"}]
    first, second = (night["best"]["value"] for night in nights)
    assert second < 0.8 * first
