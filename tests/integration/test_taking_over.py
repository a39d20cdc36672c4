"""What a worker does with what the one before it left: on a real Redis, through Celery's own results."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.signals import celeryd_after_setup

from saturn_airflow.deployment import taking_over
from saturn_airflow.deployment.processes import free_port
from saturn_airflow.deployment.taking_over import hand_back

pytestmark = pytest.mark.services

TAKER = """
import os, sys, time
from celery import Celery
app = Celery(broker=sys.argv[1])
with app.connection_for_read() as connection:
    channel = connection.channel()
    from kombu import Consumer, Queue
    taken = []
    names = [Queue(name, routing_key=name) for name in ("saturn.gpu-a", "saturn.gpu-b")]
    with Consumer(channel, names, callbacks=[lambda body, message: taken.append(message)], accept=["json"]):
        while len(taken) < 4:
            connection.drain_events(timeout=30)
        os._exit(9)  # as if it was killed: nothing is given back
"""


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Any]:
    port = free_port(0)
    where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    server = subprocess.Popen(["redis-server", *where, "--save", ""], stdout=subprocess.DEVNULL)
    app = Celery(broker=f"redis://127.0.0.1:{port}/0", backend=f"db+sqlite:///{tmp_path / 'results.db'}")
    app.conf.broker_connection_retry = True
    with app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=50, interval_start=0.1, interval_step=0)
    yield app
    server.terminate()
    server.wait()


def test_what_was_handed_to_a_killed_worker_is_queued_again_or_tried_again(app: Any) -> None:
    ids = {}
    for name, queue in {
        "waits": "saturn.gpu-a",
        "ran": "saturn.gpu-a",
        "runs elsewhere": "saturn.gpu-a",
        "not mine": "saturn.gpu-b",
    }.items():
        ids[name] = app.send_task("execute_workload", queue=queue).id
    taker = subprocess.run([sys.executable, "-c", textwrap.dedent(TAKER), app.conf.broker_url], timeout=120)
    assert taker.returncode == 9
    for name, host in {"ran": "gpu-a@here", "runs elsewhere": "gpu-a@there"}.items():
        app.backend.store_result(ids[name], {"pid": 1, "hostname": host}, states.STARTED)
    late = app.send_task("execute_workload", queue="saturn.gpu-a").id

    assert hand_back(app, "gpu-a@here", {"saturn.gpu-a"}, before=time.time() - 3600) == (0, 0), "all is new"
    assert hand_back(app, "gpu-a@here", {"saturn.gpu-a"}, before=time.time() + 1) == (1, 1)
    assert hand_back(app, "gpu-a@here", {"saturn.gpu-a"}, before=time.time() + 1) == (0, 0), "it is done once"

    state = {name: app.backend.get_task_meta(task_id)["status"] for name, task_id in ids.items()}
    assert state == {
        "waits": states.PENDING,
        "ran": states.FAILURE,
        "runs elsewhere": states.STARTED,
        "not mine": states.PENDING,
    }
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("saturn.gpu-a")
        waiting = [queue.get(block=False).headers["id"] for _ in range(2)]
        with pytest.raises(queue.Empty):
            queue.get(block=False)
    assert waiting == [ids["waits"], late], "who was first goes first"


def test_it_is_done_before_the_worker_has_processes_which_inherit_no_connection(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = app.send_task("execute_workload", queue="saturn.gpu-a").id
    for _ in range(3):
        app.send_task("execute_workload", queue="saturn.gpu-b")
    subprocess.run([sys.executable, "-c", textwrap.dedent(TAKER), app.conf.broker_url], timeout=120)
    app.backend.store_result(task_id, {"pid": 1, "hostname": "gpu-a@here"}, states.STARTED)
    worker = Celery(broker=app.conf.broker_url, backend=app.conf.result_backend)
    worker.amqp.queues.select(["saturn.gpu-a"])
    monkeypatch.setattr(taking_over, "_BEGAN", time.time() + 1)
    celeryd_after_setup.send(sender="gpu-a@here", instance=SimpleNamespace(app=worker))
    assert app.backend.get_task_meta(task_id)["status"] == states.FAILURE
    assert worker._pool is None
    assert worker._local.__dict__.get("backend") is None


WORKER = """
import os, sys, time
from saturn_airflow.deployment.taking_over import end_leftovers
print(*end_leftovers(), flush=True)
if os.fork() == 0:
    time.sleep(1000)
time.sleep(1000)
"""


def test_what_a_killed_worker_left_is_ended_by_the_next_one_and_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def start(name: Any) -> Any:
        worker = subprocess.Popen(
            [sys.executable, str(script), name], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert worker.stdout is not None
        return worker, worker.stdout.readline().split()

    workers = []
    try:
        for name in ("gpu-a", "gpu-b"):
            workers.append(start(name)[0])
        (child,) = children(workers[0])
        workers[0].kill()
        workers[0].wait()
        again, ended = start("gpu-a")
        workers.append(again)
        assert ended == [str(child)]
        assert children(workers[1]), "the other worker has what it had"
        assert start_and_end(start, workers) == [], "a worker that lives keeps what it has"
    finally:
        for worker in workers:
            subprocess.run(["pkill", "-KILL", "-g", str(worker.pid)], check=False)
            worker.kill()
            worker.wait()
            worker.stdout.close()


def start_and_end(start: Any, workers: Any) -> Any:
    worker, ended = start("gpu-b")
    workers.append(worker)
    return ended


def children(process: Any) -> Any:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        told = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
        if told.stdout:
            return [int(line) for line in told.stdout.split()]
        time.sleep(0.05)
    return []
