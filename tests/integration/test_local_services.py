"""Services of a small compose file as local processes: order, health, faults, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from saturn_airflow.deployment.compose import ComposeError
from saturn_airflow.deployment.local import LocalCluster
from saturn_airflow.deployment.processes import Processes, free_port
from saturn_airflow.model.errors import SaturnError

pytestmark = pytest.mark.slow

DEPLOYMENT = Path(__file__).resolve().parents[2] / "docker" / "compose.yaml"
SATURN = str(Path(sys.executable).parent / "saturn")
COMPOSE = """
services:
  init:
    image: any
    command: ["sh", "-c", "echo made > /data/made"]
    volumes: ["data:/data"]
  store:
    image: any
    command: ["sh", "-c", "test -e /data/made && touch /data/ready && exec sleep 1000"]
    volumes: ["data:/data"]
    depends_on:
      init: {condition: service_completed_successfully}
    healthcheck:
      test: ["CMD-SHELL", "test -e /data/ready"]
      interval: 100ms
  user:
    image: any
    # Its child leaves the process group, as a training does.
    command: ["sh", "-c", "test -e /data/ready && setsid sleep 1001 & exec sleep 1000"]
    volumes: ["data:/data"]
    depends_on:
      store: {condition: service_healthy}
    healthcheck:
      test: ["CMD", "true"]
"""


@pytest.fixture
def compose(tmp_path: Path) -> Path:
    path = tmp_path / "compose.yaml"
    path.write_text(textwrap.dedent(COMPOSE))
    return path


def cluster_of(compose: Path) -> LocalCluster:
    return LocalCluster(compose.parent / "state", compose, compose.parent)


def sleepers(folder: Path) -> list[int]:
    """Live processes that were started in a state folder."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            if process.environ().get("SATURN_SERVICE", "").startswith(str(folder)):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def until(ask: Any) -> None:
    deadline = time.monotonic() + 60
    while not ask():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_starts_when_what_it_needs_is_ready_and_all_end(compose: Path) -> None:
    state = compose.parent / "state"
    with cluster_of(compose) as cluster:
        assert (state / "volumes" / "data" / "made").read_text() == "made\n"
        assert cluster.processes.running() == ["store", "user"]
        until(lambda: len(sleepers(state)) == 3)
    assert sleepers(state) == []


def test_a_killed_service_comes_back_and_a_node_that_is_gone_takes_all_with_it(compose: Path) -> None:
    with cluster_of(compose) as cluster:
        until(lambda: len(set(map(os.getpgid, cluster.processes.marked("user")))) == 2)
        cluster.kill("user")
        assert len(cluster.processes.marked("user")) == 1, "what left the group outlives a killed service"
        cluster.start_again("user")
        until(lambda: len(cluster.processes.marked("user")) == 3)
        cluster.kill("user", everything=True)
        assert cluster.processes.marked("user") == []
        cluster.check()


def test_a_service_that_ends_by_itself_is_named(compose: Path) -> None:
    compose.write_text(compose.read_text().replace("exec sleep 1000", "echo no more room; exit 3"))
    with (
        pytest.raises(SaturnError, match=r"(?s)(store|user) ended with exit status 3:\nno more room"),
        cluster_of(compose),
    ):
        pass
    assert sleepers(compose.parent / "state") == []


def test_a_failed_init_stops_the_start(compose: Path) -> None:
    compose.write_text(compose.read_text().replace("echo made > /data/made", "echo bad password; exit 1"))
    with (
        pytest.raises(SaturnError, match=r"echo bad password; exit 1` failed:\nbad password"),
        cluster_of(compose),
    ):
        pass


def test_one_that_is_never_ready_is_named(compose: Path) -> None:
    compose.write_text(compose.read_text().replace('test -e /data/ready"]', 'false"]'))
    cluster = cluster_of(compose)
    try:
        with pytest.raises(SaturnError, match="not ready after 2 s: store, user"):
            cluster.start(timeout=2)
    finally:
        cluster.stop()


def test_an_unknown_program_or_dependency_is_named(compose: Path) -> None:
    compose.write_text(
        compose.read_text().replace('["sh", "-c", "echo made', '["no-such-program", "-c", "echo made')
    )
    with (
        pytest.raises(SaturnError, match="init can't be started: there is no program 'no-such-program'"),
        cluster_of(compose),
    ):
        pass
    compose.write_text(compose.read_text().replace("      store: {", "      shop: {"))
    with pytest.raises(ComposeError, match="user depends on 'shop', which is no service"):
        cluster_of(compose)


def test_a_folder_has_one_cluster_at_a_time(compose: Path) -> None:
    with cluster_of(compose):
        second = cluster_of(compose)
        with pytest.raises(SaturnError, match=r"a cluster already runs in \S+; end it, or use"):
            second.start()
        assert len(sleepers(compose.parent / "state")) >= 2, "the refused one ends nothing"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_ends_what_it_started(compose: Path, sign: Any) -> None:
    process = command(compose)
    process.send_signal(sign)
    process.communicate(timeout=120)
    assert process.returncode == (0 if sign == signal.SIGINT else 128 + sign)
    assert sleepers(compose.parent / "state") == []


def test_what_a_killed_command_left_is_ended_by_the_next(compose: Path) -> None:
    process = command(compose)
    process.kill()
    process.communicate()
    left = sleepers(compose.parent / "state")
    assert len(left) >= 2
    with cluster_of(compose):
        assert not set(left) & set(sleepers(compose.parent / "state"))


def test_a_process_that_does_not_listen_is_ended_anyway(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.launch(
        "deaf", ["sh", "-c", "trap '' TERM; echo up; sleep 1000 & wait; wait; sleep 1000"], dict(os.environ)
    )
    until(lambda: processes.tail("deaf") == "up")
    pid = processes.pid("deaf")
    processes.pause("deaf")
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    processes.resume("deaf")
    until(lambda: psutil.Process(pid).status() != psutil.STATUS_STOPPED)
    processes.stop(patience=0.5)
    assert not psutil.pid_exists(pid)
    assert processes.marked("deaf") == []


def test_no_two_processes_get_one_port() -> None:
    code = "from saturn_airflow.deployment.processes import free_port; print(free_port({})); input()"
    usual = free_port(0)
    before = files_of_ports()
    other = subprocess.Popen(
        [sys.executable, "-c", code.format(usual)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    theirs = int(other.stdout.readline())
    assert theirs != usual, "it was given to this process"
    assert free_port(theirs) != theirs
    other.communicate("\n")
    assert free_port(theirs) == theirs, "a claim ends with its process"
    assert files_of_ports() <= before, "it leaves no file"


def files_of_ports() -> set[Path]:
    """Files in the temporary folder that are named as a port's claim: earlier versions left theirs there."""
    return set(Path(tempfile.gettempdir()).glob("saturn-port-*"))


def command(compose: Path) -> subprocess.Popen[str]:
    """`saturn cluster`, once it is up."""
    process = subprocess.Popen(
        [
            SATURN,
            "cluster",
            "--compose",
            compose,
            "--dags",
            compose.parent,
            "--state",
            compose.parent / "state",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C" in line:
            return process
    raise AssertionError(process.wait())


def test_services_that_end_are_started_again_as_the_restart_policy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compose = tmp_path / "compose.yaml"
    compose.write_text(
        """
services:
  lasting:
    image: any
    command: ["sleep", "1000"]
    restart: unless-stopped
    healthcheck: {test: ["CMD", "true"]}
  broken:
    image: any
    command: ["sh", "-c", "echo no database; exit 3"]
    restart: always
    healthcheck: {test: ["CMD", "true"]}
  other:
    image: any
    command: ["sleep", "1000"]
    healthcheck: {test: ["CMD", "true"]}
"""
    )
    monkeypatch.setattr("saturn_airflow.deployment.restart_policy._FIRST_PAUSE", 0.001)
    said: list[str] = []
    cluster = cluster_of(compose)
    (cluster.state / "airflow").mkdir(parents=True)
    try:
        for service in cluster.services.values():
            cluster._launch(service)
        first = cluster.processes.pid("lasting")
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SaturnError, match=r"broken ended 12 times in a row(?s:.)*no database"):
            look_for_ever(cluster.restarts(said.append))
        assert cluster.processes.pid("lasting") != first
        assert cluster.processes.ended("lasting") is None
        assert "lasting ended with exit status -9; it is started again in 0.0 s" in said
        cluster.processes.kill("broken")
        os.kill(cluster.processes.pid("other"), signal.SIGKILL)
        with pytest.raises(SaturnError, match="other ended with exit status -9"):
            look_for_ever(cluster.restarts(said.append))
    finally:
        cluster.stop()


def look_for_ever(restarts: Any) -> None:
    while True:
        restarts.look()
        time.sleep(0.005)


def test_programs_that_are_missing_are_named_with_their_packages_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(tmp_path / "state", DEPLOYMENT, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-cli").symlink_to("/bin/true")
    (tmp_path / "bin" / "redis-server").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("saturn_airflow.deployment.local._postgres_bin", list)
    with pytest.raises(SaturnError, match=r"lacks curl postgresql for .* apt-get install curl postgresql"):
        cluster.start()
    assert list((tmp_path / "state").glob("*.log")) == []
