"""The server that runs are forked from, and what happens without it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from running import USERLAND, small_job, spec_for

from saturn_airflow.launch import environment, fork_server, runs
from saturn_airflow.launch.runs import Run

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server for this test alone, which ends with it; it imports nothing that no job here needs."""
    monkeypatch.setenv("LC_OF_A_TEST", str(tmp_path))
    monkeypatch.setenv("SATURN_WARM_IMPORTS", "")
    yield
    for process in psutil.process_iter(["cmdline", "environ"]):
        is_server = "saturn_airflow.launch.fork_server" in (process.info["cmdline"] or [])
        if is_server and (process.info["environ"] or {}).get("LC_OF_A_TEST") == str(tmp_path):
            process.kill()


def parent_of(run: Run) -> int:
    """The process that a run's processes were forked from."""
    while not (text := (run.folder / "alive").read_text()):
        time.sleep(0.01)
    above = psutil.Process(int(text)).parent()
    assert above is not None
    return int(above.ppid())


def kept_of_a_run() -> dict[str, str]:
    """The variables of the server that a run of :func:`spec_for` asks."""
    passed, _ = environment.for_users_code(os.environ)
    ours = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
    return fork_server._kept({**passed, **ours})


def test_runs_share_one_server_that_outlives_them(tmp_path: Path) -> None:
    first = runs.start(spec_for(tmp_path / "a", small_job("slow")))
    second = runs.start(spec_for(tmp_path / "b", small_job("slow")))
    server = parent_of(first)
    assert parent_of(second) == server
    assert server != os.getpid()
    assert [run.wait()["status"] for run in (first, second)] == ["finished", "finished"]
    assert psutil.pid_exists(server)


def test_its_death_costs_nobody_anything(tmp_path: Path) -> None:
    first = runs.start(spec_for(tmp_path / "a", small_job("slow", batches=100)))
    server = parent_of(first)
    os.kill(server, signal.SIGKILL)
    second = runs.start(spec_for(tmp_path / "b", small_job("slow", batches=20)))
    assert parent_of(second) != server
    assert [run.wait()["status"] for run in (first, second)] == ["finished", "finished"]


def test_one_that_a_signal_holds_up_is_ended_by_who_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_HELD_UP_SECONDS", 1.0)
    first = runs.start(spec_for(tmp_path / "a", small_job("slow", batches=100)))
    server = parent_of(first)
    process = psutil.Process(server)
    process.suspend()
    second = runs.start(spec_for(tmp_path / "b", small_job("slow", batches=20)))
    assert parent_of(second) == os.getpid(), "it did not wait for the server to go on"
    process.wait(60)
    third = runs.start(spec_for(tmp_path / "c", small_job("slow", batches=20)))
    assert parent_of(third) not in (server, os.getpid())
    assert [run.wait()["status"] for run in (first, second, third)] == ["finished"] * 3


@pytest.mark.parametrize(("technique", "devices"), [("single", 1), ("ddp", 2)])
def test_a_run_without_a_server_trains_the_same(
    technique: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise ConnectionRefusedError

    warm = runs.start(spec_for(tmp_path / "warm", small_job(), technique, devices))
    assert parent_of(warm) != os.getpid()
    assert warm.wait()["status"] == "finished"
    monkeypatch.setattr(fork_server, "_launch", refused)
    monkeypatch.setenv("LC_OF_A_TEST", "without")
    cold = runs.start(spec_for(tmp_path / "cold", small_job(), technique, devices))
    assert parent_of(cold) == os.getpid()
    assert cold.wait()["status"] == "finished"
    assert told(cold) == told(warm)
    assert weights(cold) == weights(warm)


def told(run: Run) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in run.so_far() if event["event"] == "step"]


def weights(run: Run) -> bytes:
    end = run.so_far()[-1]
    return Path(end["result"]["model"], "model.safetensors").read_bytes()


HARMFUL = {
    "threads": "import threading, time; threading.Thread(target=time.sleep, args=[600], daemon=True).start()",
    "CUDA": "import torch; torch.cuda.is_initialized = lambda: True",
    # Who has asked how many GPUs there are has no context, and a fork of it can't have any.
    "CUDA, asked for GPUs": (
        "import os, torch; own = os.getpid(); torch.backends.cuda.is_built = lambda: True; "
        "torch.cuda._is_in_bad_fork = lambda: os.getpid() != own"
    ),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_nothing_is_forked_from_what_might_be_broken(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets.py").write_text(HARMFUL[what])
    (tmp_path / "their_jobs.py").write_text("import datasets\nfrom small_jobs import *\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    before = runs.start(spec_for(tmp_path / "a", small_job("slow", batches=100)))
    server = parent_of(before)
    job = replace(small_job(), load_dataloader="their_jobs:noise")
    refused = runs.start(spec_for(tmp_path / "b", job, path=(str(tmp_path), str(USERLAND))))
    assert parent_of(refused) == os.getpid()
    after = runs.start(spec_for(tmp_path / "c", small_job("slow")))
    assert parent_of(after) not in (server, os.getpid())
    assert before.wait()["status"] == after.wait()["status"] == "finished"
    refused.stop()


def test_a_run_is_in_its_starters_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.start(spec_for(tmp_path / "first", small_job())).wait()
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0o077)
    try:
        run = runs.start(spec_for(tmp_path / "second", small_job("slow")))
    finally:
        os.umask(mask)
    supervisor = psutil.Process(int((run.folder / "alive").read_text()))
    assert supervisor.cwd() == str(tmp_path)
    assert run.wait()["status"] == "finished"
    assert (run.folder / "events.jsonl").stat().st_mode & 0o077 == 0


def test_the_code_and_what_libraries_read_are_part_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TZ": "UTC"}
    before = fork_server._address(variables)
    assert fork_server._address(dict(variables)) == before
    assert fork_server._address({**variables, "OMP_NUM_THREADS": "3"}) != before
    service = {"SATURN_SERVICE": "redis"}
    assert fork_server._kept(service) == service, "a service is ended with all that it started"
    source = Path(fork_server.__file__)
    times = source.stat()
    try:
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        assert fork_server._address(variables) != before
    finally:
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("what", ["folder", "limit", "cores"])
def test_what_it_would_hand_on_is_part_of_its_address(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fork_server._address({})
    if what == "folder":
        # Python looks for modules in the working folder first.
        monkeypatch.chdir(tmp_path)
        assert fork_server._address({}) != before
    elif what == "limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            assert fork_server._address({}) != before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    else:
        cores = os.sched_getaffinity(0)
        if len(cores) == 1:
            pytest.skip("there is one core only")
        os.sched_setaffinity(0, {min(cores)})
        try:
            assert fork_server._address({}) != before
        finally:
            os.sched_setaffinity(0, cores)
    monkeypatch.undo()
    assert fork_server._address({}) == before


def test_a_run_trains_where_its_starters_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    run = runs.start(spec_for(tmp_path / "job", small_job()))
    end = run.wait()
    assert end["status"] == "finished", end


def test_what_libraries_read_as_they_are_imported_is_handed_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs.start(spec_for(tmp_path / "a", small_job("slow")))
    server = parent_of(first)
    # Of tasks each has another one of these.
    monkeypatch.setenv("AIRFLOW_CTX_TRY_NUMBER", "7")
    second = runs.start(spec_for(tmp_path / "b", small_job("slow")))
    assert parent_of(second) == server
    # Else it would count where a run starts in a new interpreter only.
    monkeypatch.setenv("SKLEARN_ASSUME_FINITE", "true")
    third = runs.start(spec_for(tmp_path / "c", small_job("slow")))
    assert parent_of(third) != server
    assert psutil.Process(parent_of(third)).environ()["SKLEARN_ASSUME_FINITE"] == "true"
    assert [run.wait()["status"] for run in (first, second, third)] == ["finished"] * 3


def test_who_asks_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_ASKING_SECONDS", 0.1)
    asker, server = socket.socketpair()
    with asker, server, pytest.raises(TimeoutError):
        fork_server._answer(server, server)


def test_it_ends_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        from saturn_airflow.training import fork_server, warm
        fork_server._IDLE_SECONDS = 0.05
        warm.import_all = lambda: None
        fork_server.serve("a-test")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_users_server_is_not_asked(tmp_path: Path) -> None:
    """Who took the address before us gets neither our request nor our files."""
    kept = fork_server._kept({**os.environ, "OMP_NUM_THREADS": "1"})
    impostor = textwrap.dedent(f"""
        import os, socket, sys
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind({fork_server._address(kept)!r})
        listener.listen()
        print("ready", flush=True)
        end, _ = listener.accept()
        print("heard", len(end.recv(1 << 16)), flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", impostor], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    asked = fork_server.start(["nowhere"], os.environ, [1, 2], [], [], threads=1)
    assert asked is None
    assert process.stdout.readline() == "heard 0\n"
    process.wait(10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_served() -> None:
    serving = "from saturn_airflow.training import fork_server, warm; warm.import_all = lambda: None; "
    serving += "fork_server.serve('for-one-user')"
    server = subprocess.Popen([sys.executable, "-c", serving])
    try:
        asking = textwrap.dedent("""
            import os, socket, time
            os.setuid(65534)
            end = socket.socket(socket.AF_UNIX)
            while end.connect_ex("\\0saturn-fork-server-for-one-user"):
                time.sleep(0.05)
            print(end.recv(1))
        """)
        told = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, timeout=60)
        assert told.stdout == "b''\n"
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces everywhere")
def test_nobody_of_another_container_is_asked_or_served(tmp_path: Path) -> None:
    """Containers that share a network share these addresses, and often have the same user."""
    elsewhere = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c"]
    kept = fork_server._kept({**os.environ, "OMP_NUM_THREADS": "1"})
    impostor = f"""if True:
        import socket
        listener = socket.socket(socket.AF_UNIX)
        listener.bind({fork_server._address(kept)!r})
        listener.listen()
        print("ready", flush=True)
        end, _ = listener.accept()
        print("heard", len(end.recv(1 << 16)), flush=True)
    """
    process = subprocess.Popen([*elsewhere, impostor], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert fork_server.start(["nowhere"], os.environ, [1, 2], [], [], threads=1) is None
    assert process.stdout.readline() == "heard 0\n"
    process.wait(10)
    asking = f"""if True:
        import json, socket, struct, time
        request = json.dumps({{"references": ["os:system"], "path": [{str(tmp_path)!r}]}}).encode()
        end = socket.socket(socket.AF_UNIX)
        while end.connect_ex({fork_server._PREFIX + "for-one-container"!r}):
            time.sleep(0.05)
        try:
            end.sendall(struct.pack("I", len(request)) + request)
            print(end.recv(1))
        except ConnectionError:
            print(b"")
    """
    serving = "from saturn_airflow.launch import fork_server, warm; warm.import_all = lambda: None; "
    # What would be imported for it is told, and nothing is.
    serving += "warm.import_for = lambda *_: print('imports', flush=True); "
    serving += "fork_server.serve('for-one-container')"
    server = subprocess.Popen([sys.executable, "-c", serving], stdout=subprocess.PIPE, text=True)
    try:
        told = subprocess.run([*elsewhere, asking], capture_output=True, text=True, timeout=60)
        assert told.stdout == "b''\n", told.stderr
    finally:
        server.kill()
        assert server.communicate()[0] == ""


def test_a_broken_request_is_no_end_of_it(tmp_path: Path) -> None:
    first = runs.start(spec_for(tmp_path / "a", small_job("slow")))
    server = parent_of(first)
    kept = kept_of_a_run()
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(fork_server._address(kept))
        end.sendall(b"\x05\0\0\0no")
    second = runs.start(spec_for(tmp_path / "b", small_job("slow")))
    assert parent_of(second) == server
    assert [run.wait()["status"] for run in (first, second)] == ["finished", "finished"]


def test_a_request_that_breaks_off_leaves_no_file_open(tmp_path: Path) -> None:
    """A run whose lock stayed open in the server would look alive."""
    run = runs.start(spec_for(tmp_path / "a", small_job("slow")))
    server = parent_of(run)
    kept = kept_of_a_run()
    with open(tmp_path / "lock", "w") as lock, socket.socket(socket.AF_UNIX) as end:
        end.connect(fork_server._address(kept))
        socket.send_fds(end, [b"\xff\0\0\0"], [lock.fileno()])
    assert run.wait()["status"] == "finished"
    deadline = time.monotonic() + 10
    while (open_there := _files_of(server)) and time.monotonic() < deadline:
        time.sleep(0.05)
        if str(tmp_path / "lock") not in open_there:
            break
    assert str(tmp_path / "lock") not in _files_of(server)


def _files_of(pid: int) -> list[str]:
    return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
