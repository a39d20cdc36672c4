"""Sweeps with rounds on a real Airflow: jobs move and lose nothing, losers are dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import pytest

from saturn_airflow import HParams, Job
from saturn_airflow.launch import progress, runs

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def started(deployment: Any) -> dict[str, str]:
    """A run of each sweep, both at once, on nodes of their own."""
    return {dag_id: deployment.start(dag_id) for dag_id in ("five_rounds", "halved")}


def end_of(deployment: Any, dag_id: str, run_id: str) -> Any:
    state = deployment.wait(dag_id, run_id, timeout=1200)
    return {
        "run_id": run_id,
        "state": state,
        "result": deployment.airflow.xcom(dag_id, run_id, "sweep.report"),
        "states": deployment.states(dag_id, run_id),
    }


@pytest.fixture(scope="module")
def five(deployment: Any, started: dict[str, str]) -> Any:
    return end_of(deployment, "five_rounds", started["five_rounds"])


@pytest.fixture(scope="module")
def halved(deployment: Any, started: dict[str, str]) -> Any:
    return end_of(deployment, "halved", started["halved"])


def mlflow_runs(deployment: Any, dag_id: Any) -> Any:
    client = mlflow.MlflowClient(deployment.services.mlflow_url)
    experiment = client.get_experiment_by_name(dag_id)
    assert experiment is not None
    return client, [
        run for run in client.search_runs([experiment.experiment_id]) if "mlflow.parentRunId" in run.data.tags
    ]


def losses_of(folder: Any) -> Any:
    found = {}
    for run in runs.all_of(folder):
        for line in (run.folder / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                found[event["step"]] = event["loss"]
    return found


def test_a_sweep_in_rounds_trains_every_job(five: Any) -> None:
    assert five["state"] == "success", five["states"]
    assert {outcome["status"] for outcome in five["result"]["jobs"]} == {"finished"}
    assert five["result"]["rounds"] >= 2


def test_each_round_is_in_the_grid_and_unused_ones_are_skipped(five: Any) -> None:
    states = five["states"]
    used = five["result"]["rounds"]
    for number in range(1, 6):
        wanted = "success" if number <= used else "skipped"
        assert states[f"sweep.round_{number}.plan"] == wanted
    # On a busy machine a round may end before its jobs had their turns.
    later = [f"sweep.round_{number}.train " for number in range(2, used + 1)]
    assert any(key.startswith(tuple(later)) and state == "success" for key, state in states.items()), states
    assert "failed" not in states.values()


def test_each_rounds_plan_says_what_a_job_could_have_run_under(deployment: Any, five: Any) -> None:
    for number in (1, 2):
        of_round = f"sweep.round_{number}.plan"
        plan, choices = (
            deployment.airflow.xcom("five_rounds", five["run_id"], of_round, key)
            for key in ("plan", "choices")
        )
        assert choices.keys() == {a["job"] for a in plan["assignments"]}
        for a in plan["assignments"]:
            (chosen,) = [option for option in choices[a["job"]]["options"] if option["chosen"]]
            assert (chosen["technique"], chosen["devices"]) == (a["technique"], a["devices"])
            assert choices[a["job"]]["why"]


def trained_straight(deployment: Any, folder: Any, samples: Any) -> Any:
    """The losses of a job that is trained in one go."""
    straight = Job(
        "straight",
        "slow_later:linear",
        "slow_later:paced",
        "slow_later:loss",
        HParams(batch_size=16, lr=0.05, optimizer="torch.optim:SGD", precision="float64"),
        data_args={"samples": samples, "first": 0.0, "later": 0.0},
    )
    run = runs.start(
        runs.RunSpec(
            job=straight,
            technique="single",
            folder=str(folder / "straight"),
            node="straight",
            slots=1,
            devices=1,
            kind="cpu",
            leases_folder=str(folder / "leases"),
            path=(str(deployment.services.state.parent / "dags"),),
        )
    )
    assert run.wait()["status"] == "finished"
    return losses_of(folder / "straight")


@pytest.mark.ranks
def test_losses_are_those_of_a_job_trained_in_one_go(deployment: Any, five: Any, tmp_path: Path) -> None:
    """Whatever was stopped, moved or left running: every step once, and the same losses in float64."""
    expected = trained_straight(deployment, tmp_path, 3200)
    for job in ("slow", "even-1", "even-2"):
        found = losses_of(deployment.job_folder("five_rounds", five["run_id"], job))
        assert found == pytest.approx(expected, rel=1e-9), job


def test_a_job_has_one_mlflow_run_with_every_step_once(deployment: Any, five: Any) -> None:
    client, found = mlflow_runs(deployment, "five_rounds")
    assert sorted(run.info.run_name for run in found) == ["even-1", "even-2", "slow"]
    assert {run.info.status for run in found} == {"FINISHED"}
    for run in found:
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
        assert sorted(steps) == list(range(1, 201))


def test_the_better_half_goes_on_and_the_rest_is_pruned_not_failed(deployment: Any, halved: Any) -> None:
    result, states = halved["result"], halved["states"]
    assert halved["state"] == "success", states
    statuses = {outcome["job"]: outcome["status"] for outcome in result["jobs"]}
    assert statuses == {
        "lr-1e-05": "pruned",
        "lr-0.0001": "pruned",
        "lr-0.01": "pruned",
        "lr-0.1": "finished",
    }
    assert result["pruned"] == ["lr-1e-05", "lr-0.0001", "lr-0.01"]
    assert result["failed"] == []
    assert result["best"]["job"] == "lr-0.1"
    assert states["sweep.round_2.train lr-1e-05"] == "skipped"
    assert "failed" not in states.values()
    assert result["without_selection_seconds"] > 0


def test_every_round_has_the_sweeps_objective(deployment: Any, halved: Any) -> None:
    for number in (1, 2):
        plan = deployment.airflow.xcom("halved", halved["run_id"], f"sweep.round_{number}.plan", "plan")
        assert plan["objective"] == "mean-completion"
        assert plan["value_bound"] <= plan["value"] <= plan["makespan"]


def test_pruned_jobs_are_marked_in_mlflow_and_stopped_at_their_rung(deployment: Any, halved: Any) -> None:
    _, found = mlflow_runs(deployment, "halved")
    status = {run.info.run_name: run.data.tags["saturn.status"] for run in found}
    assert status["lr-1e-05"] == status["lr-0.0001"] == "pruned"
    assert status["lr-0.1"] == "finished"
    steps = {job: progress.of(deployment.job_folder("halved", halved["run_id"], job)).steps for job in status}
    assert steps == {"lr-1e-05": 30, "lr-0.0001": 30, "lr-0.01": 60, "lr-0.1": 90}
