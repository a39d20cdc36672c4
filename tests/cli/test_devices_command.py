"""`saturn devices`: who holds, who waits, and who else is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from saturn_airflow.cli import main
from saturn_airflow.commands.devices import in_words
from saturn_airflow.deployment.device_use import strangers
from saturn_airflow.launch import leases
from saturn_airflow.launch.holders import Holder


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


def test_a_folder_of_locks_that_is_not_there_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["devices", "--leases", str(tmp_path / "lokcs")]) == 2
    assert f"there is no folder {tmp_path}/lokcs of device locks" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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


def test_a_stranger_can_not_command_the_terminal() -> None:
    """Every process chooses its own name (PR_SET_NAME of prctl(2)), that of another user too."""
    naming = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'\\x1b[2J\\x1b]0;x\\ny'); print(flush=True); input()"
    )
    command = [sys.executable, "-c", naming]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        device = {"id": None, "name": "gpu0", "kind": "gpu", "holder": None, "strangers": [stranger.pid]}
        said = in_words({"devices": [device], "waiters": [], "ignored": [], "folder": "f"}, 0.0)
        stranger.communicate(b"\n")
    (line,) = [line for line in said.split("\n") if "not Saturn's" in line]
    assert f"process {stranger.pid} (" in line
    assert line.endswith("y)")
    assert line.isprintable()
