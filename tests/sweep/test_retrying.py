"""When a task is tried again, and how soon."""

from __future__ import annotations

import errno
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, RetryAction

from saturn_airflow import Job
from saturn_airflow.launch import past_runs, runs
from saturn_airflow.operators import retrying
from saturn_airflow.operators.following import FollowingOperator
from saturn_airflow.operators.retrying import SHORT_TASK_POLICY, TRAINING_POLICY, TryAgainError

JOB = Job("a", load_model="m:f", load_dataloader="d:f")


@pytest.mark.parametrize("policy", [SHORT_TASK_POLICY, TRAINING_POLICY])
def test_a_task_says_itself_when_it_is_tried_again(policy: Any) -> None:
    said = policy.evaluate(TryAgainError("later", 7.0), 800, 1000)
    assert (said.action, said.retry_delay) == (RetryAction.RETRY, timedelta(seconds=7))
    assert policy.evaluate(ConnectionResetError(), 1, 10).action == RetryAction.RETRY
    assert policy.evaluate(ValueError(), 1, 10).action == RetryAction.FAIL


@pytest.mark.parametrize("policy", [SHORT_TASK_POLICY, TRAINING_POLICY])
def test_a_file_that_may_not_be_written_is_no_fault_of_airflow(policy: Any) -> None:
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/shared/sweeps/dag")
    said = policy.evaluate(denied, 1, 10)
    assert (said.action, said.reason) == (RetryAction.RETRY, retrying.DISK_REASON)
    refused = PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # by a firewall
    assert policy.evaluate(refused, 1, 10).reason == "Airflow could not be asked"


@pytest.mark.parametrize("policy", [SHORT_TASK_POLICY, TRAINING_POLICY])
def test_a_task_that_is_told_to_go_before_it_is_made_is_tried_again(policy: Any) -> None:
    """Airflow's handler of SIGTERM calls ``on_kill`` of whatever there is of the task."""
    with DAG("a"):
        mapped = FollowingOperator.partial(task_id="train").expand(doc=["a", "b"])
    with pytest.raises(AttributeError) as caught:
        mapped.on_kill()  # type: ignore[attr-defined]
    assert policy.evaluate(caught.value, 1, 10).action == RetryAction.RETRY
    assert policy.evaluate(AttributeError("x", name="loss", obj=mapped), 1, 10).action == RetryAction.FAIL


@pytest.mark.parametrize("error", [SystemExit(1), KeyError("x")])
def test_what_fails_beside_a_training_costs_its_job_a_try_not_all_of_them(error: BaseException) -> None:
    """Airflow logs what an ``on_execute_callback`` raises, and lets ``sys.exit`` through."""
    retries = retrying.training_retries(2)["retries"]

    def after(try_number: int, most: int = retries) -> RetryAction:
        return TRAINING_POLICY.evaluate(error, try_number, most).action

    assert [after(number) for number in (1, 2, 3)] == [*[RetryAction.RETRY] * 2, RetryAction.FAIL]
    assert after(8, retries + 7) == RetryAction.RETRY, "it was cleared at its seventh"
    assert SHORT_TASK_POLICY.evaluate(error, 1, 10).action == RetryAction.FAIL


@pytest.mark.parametrize(
    ("max_tries", "own", "last"),
    [
        (1002, 2, 0),
        (1007, 2, 5),  # cleared at its fifth try
        (12, 2, 0),  # made by the version that gave ten tries
        (15, 2, 3),  # and cleared under it
        (0, 0, 0),
    ],
)
def test_who_cleared_a_task_is_known_under_the_tries_of_both_versions(
    max_tries: Any, own: Any, last: Any
) -> None:
    retries = retrying.training_retries(own)["retries"]
    assert retrying.cleared_after(max_tries, retries) == last


def a_run(folder: Any, number: Any, status: Any, *, saved: bool = False) -> None:
    run = folder / "runs" / f"{number:04}"
    run.mkdir(parents=True)
    (run / "alive").touch()
    spec = runs.RunSpec(job=JOB, technique="single", folder=str(folder), node="n", slots=1, devices=1)
    (run / "spec.json").write_text(json.dumps(spec.to_dict()))
    said = [{"event": "checkpoint", "step": 1, "path": "p", "seconds": 1.0}] if saved else []
    said.append({"event": "end", "status": status})
    (run / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, **e}) + "\n" for e in said))


def test_a_run_that_was_lost_after_a_checkpoint_costs_its_job_no_try(tmp_path: Path) -> None:
    """A node that is restarted again and again, over days, is not the job's fault."""
    for number in range(1, 9):
        a_run(tmp_path, number, "lost", saved=True)
    assert past_runs.failures(tmp_path) == 0
    a_run(tmp_path, 9, "lost")
    assert past_runs.failures(tmp_path) == 1, "as a job would that takes its node down at once"
    a_run(tmp_path, 10, "failed", saved=True)
    assert past_runs.failures(tmp_path) == 2


def test_delays_start_at_seconds_and_grow_with_ends_of_the_same_kind_alone(tmp_path: Path) -> None:
    def delay(status: Any) -> Any:
        return retrying.seconds_until_next_try(tmp_path, status)

    for number in range(1, 13):
        a_run(tmp_path, number, "lost", saved=True)
    assert delay("lost") <= 2, "each of them got on"
    for number in range(13, 16):
        a_run(tmp_path, number, "lost")
    grown = delay("lost")
    assert grown > 4
    a_run(tmp_path, 16, "failed")
    assert delay("failed") == 5, "a job's first own failure does not wait for what others did"
    for number in range(17, 40):
        a_run(tmp_path, number, "failed")
    assert delay("failed") == 300
