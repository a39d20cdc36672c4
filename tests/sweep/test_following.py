"""Who decides that training ends: Airflow's word on the task instance, and nothing else."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.execution_time import supervisor

from saturn_airflow.operators import following
from saturn_airflow.operators.following import FollowingOperator

pytestmark = pytest.mark.slow

WANTED = {"running", "queued", "scheduled", "up_for_retry", "up_for_reschedule", "deferred", None}
STATES = [None, *(state.value for state in TaskInstanceState)]


class Instance:
    """A task instance of which Airflow says what it is told to say."""

    dag_id, task_id, run_id, map_index = "dag", "sweep.train", "run", 3

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def get_task_states(self, **question: Any) -> dict[str, dict[str, Any]]:
        assert question == {"dag_id": "dag", "task_ids": ["sweep.train"], "run_ids": ["run"], "map_index": 3}
        found: dict[str, dict[str, Any]] = self.answer() if callable(self.answer) else self.answer
        return found


def operator() -> FollowingOperator:
    return FollowingOperator(task_id="train")


@pytest.mark.parametrize("state", STATES)
def test_only_states_that_a_user_brings_about_end_training(state: str | None) -> None:
    answer = {"run": {"sweep.train_3": state}}
    assert operator().is_wanted(Instance(answer)) == (state in WANTED)


@pytest.mark.parametrize("answer", [{}, {"run": {}}])
def test_a_deleted_run_ends_training(answer: dict[str, Any]) -> None:
    assert not operator().is_wanted(Instance(answer))


def test_no_answer_ends_nothing() -> None:
    def broken() -> None:
        raise BrokenPipeError

    release = threading.Event()
    assert operator().is_wanted(Instance(broken))
    assert operator().is_wanted(Instance(lambda: release.wait(60)))
    release.set()


def test_a_late_answer_is_waited_for_as_long_as_airflow_lets_the_task_live() -> None:
    lets_live = inspect.signature(supervisor.WatchedSubprocess.kill).parameters["escalation_delay"].default
    assert lets_live - 1.5 <= following.ASKING_SECONDS < lets_live


def test_being_told_to_go_is_noted() -> None:
    train = operator()
    assert not train.must_go()
    train.on_kill()
    assert train.must_go()
    assert not train.is_orphan()


def test_an_orphan_notices() -> None:
    child = textwrap.dedent("""
        import os, sys, time
        from saturn_airflow.operators.following import FollowingOperator
        following = FollowingOperator(task_id="train")
        assert not following.must_go()
        print("ready", flush=True)
        while not following.must_go():
            time.sleep(0.05)
        assert following.is_orphan()
        print("orphan", flush=True)
        """)
    # A shell in between, which dies at once when it is told to.
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f'"{sys.executable}" -c "$0" & wait', child], stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    assert shell.stdout.readline() == "ready\n"
    os.kill(shell.pid, 9)
    assert shell.stdout.readline() == "orphan\n"
    shell.wait()


def test_who_goes_with_the_parent_ends_with_it() -> None:
    child = textwrap.dedent("""
        import time
        from saturn_airflow.operators.following import go_with_parent
        go_with_parent()
        print("ready", flush=True)
        time.sleep(600)
        """)
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f'"{sys.executable}" -c "$0" & wait', child], stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    assert shell.stdout.readline() == "ready\n"
    begin = time.monotonic()
    os.kill(shell.pid, 9)
    assert shell.stdout.read() == "", "the pipe is closed when the child is gone"
    assert time.monotonic() - begin < 300
    shell.wait()
