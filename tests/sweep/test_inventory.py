"""Where a sweep's nodes come from when the DAG does not name them, and what becomes of old sweeps' files."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator
from saturn_airflow.cli import main
from saturn_airflow.launch import leases
from saturn_airflow.launch.lease_folder import FOLDER_VARIABLE
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.operators import inventory
from saturn_airflow.operators.context import leases_folder
from saturn_airflow.operators.pruning import prune
from saturn_airflow.tracking.outbox import Outbox

JOB = Job("only", "small_jobs:linear", "small_jobs:noise", "small_jobs:squared", hparams=HParams(batches=5))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__SATURN__CHECK_REFERENCES", "False")
    monkeypatch.delenv("AIRFLOW__SATURN__NODES", raising=False)
    return tmp_path


def sweep_tasks() -> set[str]:
    with DAG("inventory") as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[JOB])
    return set(dag.task_ids)


def test_nodes_come_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__NODES", "gpu-a:8:a100, gpu-b:2:cpu:slow")
    assert inventory.deployed_cluster() == Cluster(
        Node("gpu-a", devices=8, kind="a100"), Node("gpu-b", devices=2, kind="cpu", queue="slow")
    )
    assert {"sweep.train.gpu-a", "sweep.train.gpu-b"} <= sweep_tasks()


@pytest.mark.parametrize(
    "text", ["gpu-a", "gpu-a:many", "gpu-a:8:a100:q:more", "gpu-a:0", "gpu-a:2, gpu-a:2"]
)
def test_a_line_that_is_wrong_is_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__NODES", text)
    with pytest.raises(InvalidSweepError, match=r"^sweep 'sweep': \[saturn\] nodes: .*gpu-a"):
        sweep_tasks()


def test_nodes_announce_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidSweepError, match="no nodes are known; give the sweep a cluster"):
        sweep_tasks()
    assert main(["devices", "--announce", "gpu-b", "--cpu", "2"]) == 0
    assert main(["devices", "--announce", "gpu-a", "--cpu", "4", "--queue", "fast"]) == 0
    assert "gpu-a: 4 x cpu, queue fast" in capsys.readouterr().out
    assert inventory.deployed_cluster() == Cluster(
        Node("gpu-a", devices=4, kind="cpu", queue="fast"), Node("gpu-b", devices=2, kind="cpu")
    )
    assert {"sweep.train.gpu-a", "sweep.train.gpu-b"} <= sweep_tasks()


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_announcement_is_refused_by_name(home: Path, text: str) -> None:
    (home / "nodes").mkdir()
    (home / "nodes" / "gpu-a.json").write_text(text)
    with pytest.raises(InvalidSweepError, match=r"gpu-a\.json does not describe a node"):
        inventory.deployed_cluster()


def test_what_a_later_version_announces_besides_is_left_alone(home: Path) -> None:
    """Nodes may be upgraded before the machine that parses DAG files."""
    (home / "nodes").mkdir()
    (home / "nodes" / "gpu-a.json").write_text('{"name": "gpu-a", "devices": 2, "links": "nvlink"}')
    assert inventory.deployed_cluster() == Cluster(Node("gpu-a", 2))


def test_listeners_are_looked_for_only_where_there_are_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "LocalExecutor")
    inventory.check_listeners(Cluster(Node("gpu-a", devices=1)))


def test_the_folder_of_leases_is_the_configured_one_or_that_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__SATURN__LEASES_FOLDER", raising=False)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "library"))
    assert leases_folder() == str(leases.default_folder()) == str(tmp_path / "library")
    monkeypatch.setenv("AIRFLOW__SATURN__LEASES_FOLDER", str(tmp_path / "configured"))
    assert leases_folder() == str(tmp_path / "configured")


def test_devices_shows_holders_and_waiters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIRFLOW__SATURN__LEASES_FOLDER", str(tmp_path / "leases"))
    folder = tmp_path / "leases"
    with leases.acquire(["n-cpu0"], "nightly: job a", folder=folder):
        waiter = leases.Waiter(["n-cpu0", "n-cpu1"], "weekly: job b", folder=folder)
        with leases.acquire(["n-cpu2"], "released soon", folder=folder):
            pass
        assert main(["devices", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert main(["devices"]) == 0
        text = capsys.readouterr().out
        waiter.close()
    holders = {device["name"]: device["holder"] and device["holder"]["who"] for device in shown["devices"]}
    assert holders == {"n-cpu0": "nightly: job a", "n-cpu2": None}
    assert shown["devices"][0]["holder"]["pid"] == os.getpid()
    assert [w["who"] for w in shown["waiters"]] == ["weekly: job b"]
    assert f"nightly: job a (process {os.getpid()})" in text
    assert "weekly: job b" in text


def old_sweep(home: Path, name: str) -> Path:
    """A sweep whose files are all forty days old."""
    run = home / "sweeps" / "dag" / name / "sweep" / "job" / "runs" / "0001"
    run.mkdir(parents=True)
    (run / "alive").write_text("1")
    (run / "events.jsonl").touch()
    sweep = run.parents[2]
    age(sweep)
    return sweep


def age(sweep: Path, days: float = 40.0) -> None:
    for path in [*sweep.rglob("*"), sweep]:
        os.utime(path, (time.time() - days * 86400,) * 2)


def test_old_sweeps_are_removed_and_live_ones_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, asking, recent, unsent = (old_sweep(home, name) for name in ("old", "asking", "recent", "unsent"))
    (recent / "job" / "runs" / "0001" / "events.jsonl").touch()
    Outbox(unsent / "job").append({"kind": "tags", "values": {"a": "b"}})
    age(unsent)
    alive = old_sweep(home, "alive")
    with open(alive / "job" / "runs" / "0001" / "alive") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setenv("AIRFLOW__SATURN__KEEP_SWEEPS_DAYS", "0")
        assert prune() == []
        monkeypatch.delenv("AIRFLOW__SATURN__KEEP_SWEEPS_DAYS")
        assert prune(keep=asking) == [old]
    assert not old.parent.exists(), "an empty folder for each DAG run would stay for ever"
    assert all(sweep.exists() for sweep in (asking, recent, unsent, alive))


def test_a_clock_that_is_ahead_removes_no_sweep(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of files are those of the shared disk."""
    old, recent = old_sweep(home, "old"), old_sweep(home, "recent")
    age(recent, 1.0)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 35 * 86400)
    assert prune() == [old]
    assert recent.exists()


def pools_of(queue: str = "saturn.", **settings: Any) -> dict[str, str]:
    """The pool of each task in queues that begin so; by default those of nodes."""
    nodes = Cluster(Node("gpu-a", 8), Node("gpu-b", 8))
    with DAG("pools") as dag:
        SaturnSweepOperator(task_id="sweep", jobs=[JOB], cluster=nodes, **settings)
    return {task.task_id: task.pool for task in dag.tasks if task.queue.startswith(queue)}


def test_tasks_wait_in_the_pool_of_their_node_once_it_was_made() -> None:
    assert set(pools_of().values()) == {"default_pool"}
    inventory.record_pools({"saturn.gpu-a": 10})
    for rounds in (1, 2):
        pools = pools_of(rounds=rounds)
        assert {pool for task, pool in pools.items() if task.endswith("gpu-a")} == {"saturn.gpu-a"}
        assert {pool for task, pool in pools.items() if task.endswith("gpu-b")} == {"default_pool"}
    chosen = pools_of(default_args={"pool": "mine"})
    assert set(chosen.values()) == {"mine"}


def test_tasks_that_need_no_device_wait_in_a_pool_of_their_own_once_it_was_made() -> None:
    assert set(pools_of("default").values()) == {"default_pool"}
    inventory.record_pools({"saturn": 4})
    for rounds in (1, 2):
        assert set(pools_of("default", rounds=rounds).values()) == {"saturn"}
    assert set(pools_of(rounds=2).values()) == {"default_pool"}, "nodes have pools of their own"
    assert set(pools_of("default", default_args={"pool": "mine"}).values()) == {"mine"}


def test_a_damaged_record_of_pools_is_named(home: Path) -> None:
    (home / "pools.json").write_text("{")
    with pytest.raises(InvalidSweepError, match=r"pools\.json is damaged .*run `saturn pools` again"):
        pools_of()


def test_a_node_without_a_pool_is_told_of_where_there_are_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nodes = [Node("gpu-a", 8), Node("gpu-b", 8)]
    inventory.record_pools({"saturn.gpu-a": 10, "saturn": 4})
    inventory.warn_of_no_pool(nodes, said.append)
    assert said == []
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    inventory.warn_of_no_pool(nodes, said.append)
    assert "gpu-b: no pool" in said[0]
    assert "run `saturn pools`" in said[0]
