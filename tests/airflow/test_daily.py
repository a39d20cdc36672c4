"""The example of daily retraining: a night starts from what the one before registered, and has to beat it."""

from __future__ import annotations

from typing import Any

import pytest
from mlflow import MlflowClient

from saturn_airflow.planning.online.error_law import LEAST_ERRORS

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def nights(deployment: Any) -> Any:
    """The results of two nights."""
    results = []
    for _ in range(2):
        run_id = deployment.start("warm_start")
        assert deployment.wait("warm_start", run_id, 800) == "success"
        results.append(deployment.airflow.xcom("warm_start", run_id, "sweep.report"))
    return results


def test_the_second_night_starts_from_the_first_nights_champion(deployment: Any, nights: Any) -> None:
    client = MlflowClient(deployment.services.mlflow_url)
    came_from = [
        {client.get_run(job["run_id"]).data.params["init_from"] for job in night["jobs"]} for night in nights
    ]
    assert came_from == [{"scratch"}, {"models:/digits_daily/1"}]
    first, second = (night["best"]["value"] for night in nights)
    assert second < 0.8 * first


def test_nights_keep_how_far_their_estimates_were_off_and_promise_nothing_before_enough_is_known(
    deployment: Any, nights: Any
) -> None:
    client = MlflowClient(deployment.services.mlflow_url)
    experiment = client.get_experiment_by_name("warm_start")
    assert experiment is not None
    tag = "tags.`saturn.errors` LIKE '%nodes%'"
    assert len(client.search_runs([experiment.experiment_id], tag)) == len(nights)
    for night in nights:
        promise = night["promise"]
        if "why" in promise:  # else sweeps of other DAGs have told enough
            assert "how far estimates are off" in promise["why"]
        else:
            assert promise["errors"] >= LEAST_ERRORS
            assert promise["sweeps"] >= 2
            assert promise["kept"] == (promise["took"] <= promise["seconds"])


def test_the_champion_is_scored_anew_on_the_nights_data_before_it_is_beaten(
    deployment: Any, nights: Any
) -> None:
    first, second = nights
    assert (first["registered"]["version"], first["registered"]["champion"]) == ("1", None)
    # The data are the same every night here, so the champion has the value that it had.
    scored = second["champion"]
    assert (scored["version"], scored["metric"]) == ("1", "eval_loss")
    assert scored["value"] == pytest.approx(first["best"]["value"], rel=1e-4)
    assert scored["beaten_by"] == pytest.approx(scored["value"] - second["best"]["value"])
    assert second["registered"]["version"] == "2"
    assert second["registered"]["champion"]["scored"] is True
    client = MlflowClient(deployment.services.mlflow_url)
    tags = client.get_model_version_by_alias("digits_daily", "champion").tags
    assert (tags["saturn.champion"], tags["saturn.init_from"]) == ("1", "models:/digits_daily/1")
    assert float(tags["saturn.beaten_by"]) == pytest.approx(scored["beaten_by"])

    # The trend over the nights, as MLflow's table and charts of the sweeps have it.
    experiment = client.get_experiment_by_name("warm_start")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    sweeps = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    assert [run.data.metrics["best_value"] for run in sweeps] == [n["best"]["value"] for n in nights]
    assert sweeps[1].data.metrics["champion_beaten_by"] == pytest.approx(scored["beaten_by"])
