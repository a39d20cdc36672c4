"""MLflow away, killed, slow; processes killed; many at once. Nothing is lost, nothing is doubled."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow import tracking
from saturn_airflow.model.errors import DiskError
from saturn_airflow.tracking import server
from saturn_airflow.tracking.mlflow_runs import JobRun, SweepRun
from saturn_airflow.tracking.server import MlflowAwayError

# Each process is a new one, but for the seconds that importing MLflow takes.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["mlflow", "mlflow.store.tracking.sqlalchemy_store"])

pytestmark = pytest.mark.services

NOBODY = "http://127.0.0.1:9"


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def open_sweep(uri: str, folder: Path, key: str = "") -> SweepRun:
    tags = {"saturn.sweep": key or f"dag/{uuid.uuid4()}/sweep"}
    return tracking.open_sweep(uri, "nightly", "sweep", tags, {}, folder / "sweep", patience=0)


def open_job(uri: str, folder: Path, sweep: SweepRun, name: str = "a") -> JobRun:
    return tracking.open_job(uri, sweep.to_dict(), name, {"lr": 0.1}, {}, folder / "sweep" / name)


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number, "epoch": 0, "loss": float(number), "time": 1.7e9 + number}


def losses(uri: str, run_id: str | None) -> list[float]:
    return [metric.value for metric in client(uri).get_metric_history(run_id, "loss")]


def runs(uri: str) -> list[Any]:
    experiments = [e.experiment_id for e in client(uri).search_experiments()]
    return list(client(uri).search_runs(experiments))


def test_a_server_that_is_away_from_the_start_gets_everything_once_it_is_there(
    own_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = open_sweep(own_server.uri, tmp_path)
    assert sweep.id is None
    assert sweep.url is None
    jobs = [open_job(own_server.uri, tmp_path, sweep, name) for name in "abc"]
    for job in jobs:
        for number in range(50):
            job.follow(step(number))
        assert job.log_model_folder(Path(__file__).parent) is None
        assert not job.close("finished")
    assert not tracking.send_outbox(own_server.uri, tmp_path / "sweep", patience=0)
    assert "MLflow takes no records (no answer from" in caplog.text

    own_server.start()
    assert tracking.send_outbox(own_server.uri, tmp_path / "sweep")

    found = {run.info.run_name: run for run in runs(own_server.uri)}
    assert len(runs(own_server.uri)) == 4
    parent = found["sweep"].info.run_id
    for name in "abc":
        assert found[name].data.tags["mlflow.parentRunId"] == parent
        assert found[name].data.params["lr"] == "0.1"
        assert found[name].info.status == "FINISHED"
        assert losses(own_server.uri, found[name].info.run_id) == [float(n) for n in range(50)]
        assert client(own_server.uri).list_artifacts(found[name].info.run_id, "model")
    assert tracking.reopen_sweep(own_server.uri, sweep.to_dict(), tmp_path / "later").id == parent


def test_a_server_killed_and_started_again_while_training_goes_on(own_server: Any, tmp_path: Path) -> None:
    own_server.start()
    sweep = open_sweep(own_server.uri, tmp_path)
    job = open_job(own_server.uri, tmp_path, sweep)
    assert job.wait(60)
    for number in range(300):
        job.follow(step(number))
        if number == 100:
            assert job.flush()
        if number == 150:
            # Killed with a request under way, as often as not.
            threading.Thread(target=job.flush).start()
            own_server.kill()
        if number == 250:
            assert not job.flush()
            own_server.start()
    assert job.close("finished")
    assert losses(own_server.uri, job.id) == [float(n) for n in range(300)]
    assert client(own_server.uri).get_run(job.id).info.status == "FINISHED"
    assert len(runs(own_server.uri)) == 2


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_training_does_not_wait_for_a_server_that_hangs(
    black_hole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sweep = open_sweep(NOBODY, tmp_path)
    job = open_job(black_hole, tmp_path, sweep)
    for number in range(2_000):
        job.follow(step(number))
    # All of it was recorded before the server's first answer was given up on.
    assert job._background._tries == 0
    assert job.id is None
    assert not job.close("finished")
    assert not tracking.send_outbox(black_hole, tmp_path / "sweep", patience=0)


def train_until_killed(uri: str, folder: Path, first: int, heard: Any) -> None:
    job = open_job(uri, folder, open_sweep(uri, folder, f"dag/killed/{folder.name}"))
    for number in range(first, 3000):
        job.follow(step(number))
        if number % 1000 == 500:
            job.wait(60)
            heard.send(number)
    assert job.close()


def test_a_process_killed_while_it_sends_leaves_the_rest_to_the_retry(uri: str, tmp_path: Path) -> None:
    for first, until in ((0, 500), (400, 1500), (1400, 2500)):
        hear, say = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=train_until_killed, args=(uri, tmp_path, first, say))
        process.start()
        while hear.recv() != until:
            pass
        process.kill()
        process.join()
    hear, say = PROCESSES.Pipe(duplex=False)
    train_until_killed(uri, tmp_path, 2400, say)
    (run,) = (run for run in runs(uri) if run.data.tags.get("saturn.sweep") == f"dag/killed/{tmp_path.name}")
    (job,) = (job for job in runs(uri) if job.data.tags.get("mlflow.parentRunId") == run.info.run_id)
    assert losses(uri, job.info.run_id) == [float(n) for n in range(3000)]


def open_many(uri: str, folder: Path, key: str, rounds: int, start: Any, opened: Any) -> None:
    for round in range(rounds):
        start.wait(60)
        opened.put((round, open_sweep(uri, folder / str(round), f"{key}/{round}").id))


def test_processes_that_open_the_same_run_at_once_get_the_same(uri: str, tmp_path: Path) -> None:
    key, rounds, crowd = str(uuid.uuid4()), 8, 4
    start, opened = PROCESSES.Barrier(crowd), PROCESSES.Queue()
    processes = [
        PROCESSES.Process(target=open_many, args=(uri, tmp_path / str(n), key, rounds, start, opened))
        for n in range(crowd)
    ]
    for process in processes:
        process.start()
    answers = [opened.get(timeout=120) for _ in range(rounds * crowd)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for round in range(rounds):
        (one,) = {run_id for r, run_id in answers if r == round}
        assert one is not None
        same = [run for run in runs(uri) if run.data.tags.get("saturn.sweep") == f"{key}/{round}"]
        assert [run.info.run_id for run in same] == [one]


def train_in_a_crowd(uri: str, folder: Path, name: str) -> None:
    job = open_job(uri, folder, open_sweep(uri, folder / name, "dag/run/crowd"), name)
    for number in range(300):
        job.follow(step(number))
        if number % 20 == 0:
            job.flush()
    assert job.close()


def test_processes_that_write_to_a_new_embedded_store_at_once_lose_nothing(tmp_path: Path) -> None:
    uri = tracking.resolve_uri(tmp_path / "state")
    names = [f"job-{n}" for n in range(6)]
    processes = [PROCESSES.Process(target=train_in_a_crowd, args=(uri, tmp_path, name)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = {run.info.run_name: run.info.run_id for run in runs(uri)}
    assert set(found) == {"sweep", *names}
    for name in names:
        assert losses(uri, found[name]) == [float(n) for n in range(300)]


def test_records_follow_to_another_server(embedded_uri: str, tmp_path: Path) -> None:
    first, second = (tracking.resolve_uri(tmp_path / name) for name in ("first", "second"))
    job = open_job(first, tmp_path, open_sweep(first, tmp_path))
    for number in range(10):
        job.follow(step(number))
    assert job.close()
    assert tracking.send_outbox(second, tmp_path / "sweep")
    (copy,) = (run for run in runs(second) if run.info.run_name == "a")
    assert losses(second, copy.info.run_id) == [float(n) for n in range(10)]
    assert tracking.send_outbox(second, tmp_path / "sweep")
    assert len(runs(second)) == 2


def test_a_locked_store_is_waited_for(tmp_path: Path) -> None:
    import sqlite3

    uri = tracking.resolve_uri(tmp_path)
    job = open_job(uri, tmp_path, open_sweep(uri, tmp_path))
    assert job.wait(60)
    lock = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    for number in range(10):
        job.follow(step(number))
    threading.Timer(2, lambda: lock.execute("ROLLBACK")).start()
    assert job.close()
    lock.close()
    assert losses(uri, job.id) == [float(n) for n in range(10)]


def test_a_server_that_is_not_there_is_said_in_one_short_line() -> None:
    with pytest.raises(MlflowAwayError) as raised:
        server.experiment_id(NOBODY, "any")
    assert str(raised.value) == "no answer from http://127.0.0.1:9: Connection refused"
    # Nor does it tell the login that may stand in the address.
    with pytest.raises(MlflowAwayError) as raised:
        server.experiment_id(NOBODY.replace("//", "//ann:secret@"), "any")
    assert str(raised.value) == "no answer from http://127.0.0.1:9: Connection refused"


def test_a_server_that_answers_with_errors_is_not_said_to_be_away(tmp_path: Path) -> None:
    """As one does whose store for artifacts is full, or can't be written."""

    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(500)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as broken:
        threading.Thread(target=broken.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{broken.server_port}"
        with pytest.raises(MlflowAwayError) as raised:
            server.experiment_id(url, "any")
        broken.shutdown()
    assert str(raised.value) == f"{url} answers with errors of its own (status 500), as its log tells"


def test_a_folder_that_cant_be_locked_keeps_no_other_from_mlflow(
    embedded_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that belongs to another user: each sweep sends what all others have left."""
    folder = tmp_path / "sweep"
    sweep = open_sweep(NOBODY, tmp_path)
    for name in "abc":
        job = open_job(NOBODY, tmp_path, sweep, name)
        job.follow(step(0))
        assert not job.close("finished")
    lock = folder / "b" / "mlflow" / "lock"
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert not sweep.close("finished")
    before = {run.info.run_id for run in runs(embedded_uri)}

    def ended() -> set[str]:
        found = [run.info for run in runs(embedded_uri) if run.info.run_id not in before]
        return {info.run_name for info in found if info.status == "FINISHED"}

    assert not tracking.send_outbox(embedded_uri, folder, patience=0)
    assert ended() == {"a", "c"}, "what the sweep says of its jobs comes after theirs"
    assert f"The records in {folder}/b/mlflow can't be sent to MLflow, and stay there" in caplog.text
    lock.rmdir()
    assert tracking.send_outbox(embedded_uri, folder)
    assert ended() == {"a", "b", "c", "sweep"}


def test_that_records_are_kept_is_said_once_not_with_each_folder_that_waits(
    own_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = open_sweep(own_server.uri, tmp_path)
    for name in "ab":
        job = open_job(own_server.uri, tmp_path, sweep, name)
        job.follow(step(0))
        assert not job.close("finished")
    assert not sweep.close("finished")
    assert not tracking.send_outbox(own_server.uri, tmp_path / "sweep", patience=0)

    (said,) = (record.getMessage() for record in caplog.records if "MLflow" in record.getMessage())
    assert "Connection refused" in said
    assert f"kept in {tmp_path / 'sweep'}/mlflow and sent when it does" in said


def test_what_a_full_disk_has_no_room_for_is_not_taken_for_sent(embedded_uri: str, small_disk: Any) -> None:
    """Else nobody would say in MLflow that the sweep has ended."""
    sweep = open_sweep(embedded_uri, small_disk.path)
    assert sweep.flush()
    small_disk.fill()
    sweep.log_bytes(b"x" * 8192, "report.json")
    with pytest.raises(DiskError, match=r"records for MLflow can't be written .* has 0 kB of"):
        sweep.check_kept()
    small_disk.free()
    sweep.log_bytes(b"x" * 8192, "report.json")
    sweep.check_kept()
    small_disk.fill()
    sweep.tag({"long": "x" * 5000})
    assert not sweep.close()
    with pytest.raises(DiskError, match="records for MLflow can't be written"):
        sweep.check_kept()
    assert client(embedded_uri).get_run(sweep.id).info.status == "RUNNING"
    small_disk.free()
    sweep.check_kept()
    assert tracking.send_outbox(embedded_uri, small_disk.path / "sweep")
    assert client(embedded_uri).get_run(sweep.id).info.status == "FINISHED"


def test_the_run_of_a_job_that_its_task_left_to_another_try_is_ended_where_none_comes(
    embedded_uri: str, tmp_path: Path
) -> None:
    """As where somebody marks the task as a success: the report stops its training before Airflow says so."""
    sweep = open_sweep(embedded_uri, tmp_path)
    mlflow, ended = client(embedded_uri), {"a": "KILLED", "lost": "FAILED", "done": "FINISHED"}
    ids = {}
    for name in ended:
        job = open_job(embedded_uri, tmp_path, sweep, name)
        job.follow(step(1))
        assert job.close("finished") if name == "done" else job.leave()
        ids[name] = job.id
    assert {mlflow.get_run(ids[name]).info.status for name in ("a", "lost")} == {"RUNNING"}
    for status_of in ({"a": "stopped", "lost": "lost", "done": "lost"}, dict.fromkeys(ended, "failed")):
        for name, status in status_of.items():
            tracking.end_left_open(name, tmp_path / "sweep" / name, status, "why")
        assert tracking.send_outbox(embedded_uri, tmp_path / "sweep")
        assert {name: mlflow.get_run(run).info.status for name, run in ids.items()} == ended
    tracking.end_left_open("none", tmp_path / "sweep" / "none", "lost", None)
    assert not (tmp_path / "sweep" / "none").exists()
    again = open_job(embedded_uri, tmp_path, sweep, "a")  # somebody has cleared it
    assert again.leave()
    assert mlflow.get_run(ids["a"]).info.status == "RUNNING"
    tracking.end_left_open("a", tmp_path / "sweep" / "a", "stopped", "why")
    assert tracking.send_outbox(embedded_uri, tmp_path / "sweep")
    assert mlflow.get_run(ids["a"]).info.status == "KILLED"
