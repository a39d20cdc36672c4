"""Two nights on the cluster: the second starts from the first's champion, under every technique alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlflow
import pytest
from fault_watch import Watched

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.ranks, pytest.mark.timeout(1800)]


def test_the_second_night_starts_from_the_first_ones_champion_under_every_technique(
    cluster: Any, figure: Callable[[str], None]
) -> None:
    nights = []
    for _ in range(2):
        sweep = Watched(cluster, "warm_nights")
        assert cluster.wait(sweep.dag_id, sweep.run_id, 800) == "success", sweep.why()
        nights.append(cluster.airflow.xcom(sweep.dag_id, sweep.run_id, "sweep.report"))
    first, second = ({job["job"]: job for job in night["jobs"]} for night in nights)
    client = mlflow.MlflowClient(cluster.mlflow_url)
    runs = [{name: client.get_run(job["run_id"]) for name, job in night.items()} for night in (first, second)]
    assert {job["technique"] for job in second.values()} == {"ddp", "fsdp", "pipeline", "spill"}
    came_from = [{run.data.params["init_from"] for run in of_night.values()} for of_night in runs]
    assert came_from == [{"scratch"}, {"models:/warm_nights/1"}]

    # What is not trained has the champion's loss: exactly these weights came to each technique.
    value = nights[1]["champion"]["value"]
    assert value == pytest.approx(nights[0]["best"]["value"], rel=1e-4)
    for name, job in second.items():
        if name.endswith("-0.0"):
            assert job["eval_loss"] == pytest.approx(value, rel=1e-4), name
            assert first[name]["eval_loss"] > 1.02 * value, name
        else:
            assert job["eval_loss"] < first[name]["eval_loss"], name

    # What came from what.
    best = nights[1]["best"]["job"]
    version = client.get_model_version_by_alias("warm_nights", "champion")
    assert (version.version, version.run_id) == ("2", runs[1][best].info.run_id)
    assert (version.tags["saturn.champion"], version.tags["saturn.init_from"]) == (
        "1",
        "models:/warm_nights/1",
    )
    values = [night["best"]["value"] for night in nights]
    figure(f"eval_loss of the best: {values[0]:.4f}, a night later {values[1]:.4f}")
