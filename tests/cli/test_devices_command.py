"""`saturn devices`: who holds, who waits, and who else is there."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from saturn_airflow.cli import main
from saturn_airflow.deployment.device_use import strangers
from saturn_airflow.launch import leases
from saturn_airflow.launch.lease_folder import Holder


def test_holders_and_waiters_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with leases.acquire(["node-cpu0"], "the first job", folder=tmp_path):
        waiter = leases.Waiter(["node-cpu0"], "the second job", folder=tmp_path)
        with closing(waiter):
            assert main(["devices", "--leases", str(tmp_path), "--json"]) == 0
            shown = json.loads(capsys.readouterr().out)
            assert main(["devices", "--leases", str(tmp_path)]) == 0
            said = capsys.readouterr().out
    (device,) = shown["devices"]
    assert (device["name"], device["kind"], device["strangers"]) == ("node-cpu0", "cpu", [])
    assert device["holder"]["who"] == "the first job"
    assert [waiter["who"] for waiter in shown["waiters"]] == ["the second job"]
    assert f"the first job (process {os.getpid()})" in said
    assert f"the second job (process {os.getpid()})" in said


def test_what_only_an_announcement_takes_is_refused_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--cpu", "2"]) == 2
    assert "--cpu 2 says what is announced, and nothing is: add --announce NAME" in capsys.readouterr().err


def test_a_stranger_is_who_is_not_in_the_session_of_the_holder() -> None:
    own = Holder("a job", os.getpid(), time.time())
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert strangers([os.getpid(), other.pid], own) == [other.pid]
        assert strangers([os.getpid()], None) == [os.getpid()]
    finally:
        other.kill()
        other.wait()
