"""The server that runs are forked from, so that a node imports torch once and not once for each run.

It starts with the first need, listens on a socket of Linux's abstract namespace, and ends when nobody asked
for anything for a while. It belongs to one user, one environment and one version of the code, and both ends
let the kernel tell who the other is (``SO_PEERCRED``, unix(7)). It imports and forks; it never runs a user's
code, never touches CUDA and starts no threads, and ends where something it imported did. What it has forked
needs it no more: when it dies, the next run starts in a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from saturn_airflow.launch import forked, process_above
from saturn_airflow.launch.forked import run_and_exit
from saturn_airflow.launch.standstill import Standstill

_PREFIX = "\0saturn-fork-server-"
_READY, _GO = b"r", b"g"
# A server that nobody asked for this long ends.
_IDLE_SECONDS = 300.0
# Its socket is there as soon as its interpreter runs; what it imports takes longer.
_START_SECONDS = 10.0
_READY_SECONDS = 120.0
# One that a signal holds up (SIGSTOP) for so long is ended: each run on the node would wait for it.
_HELD_UP_SECONDS = 5.0
# Who asks sends all it has to say at once; one that is held up meanwhile keeps others waiting no longer.
_ASKING_SECONDS = 10.0
# Variables that differ from task to task, or that no library reads while it is imported. Servers with other
# values of any other variable are other servers.
_NOT_READ_AT_IMPORT = (
    *("AIRFLOW", "COLUMNS", "LINES", "MLFLOW_", "OTEL_", "PWD", "SATURN_", "TERM"),
    *("AWS_", "AZURE_", "BOTO", "GOOGLE_", "KUBERNETES_"),
)
# By this one, services that run as local processes are found, with all that they started.
_OF_SERVICES = "SATURN_SERVICE"
# What a process inherits besides files and variables: limits, and who and where the kernel takes it for.
_INHERITED = ("limits", "cgroup", "oom_score_adj")
_INHERITED_STATUS = (
    *("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp:", "Cpus_allowed:", "Mems_allowed:"),
)


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[int],
    references: Sequence[str],
    path: Sequence[str],
    threads: int,
) -> int | None:
    """Fork a supervisor from this node's server, which is started if there is none.

    :param arguments: what :mod:`saturn_airflow.launch.supervisor` gets: a run's folder.
    :param environment: its variables.
    :param files: open files it inherits: one for its output, one that it holds, and, where there is one, what
        it is handed over (:mod:`saturn_airflow.launch.handed_over`).
    :param references: ``"module:name"`` references of a job, whose harmless imports the server makes.
    :param path: folders of the user's modules.
    :param threads: CPU threads of each rank.
    :returns: its process id; None where no server is to be had, and nothing was started.
    """
    request = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "folder": working_folder(),
        "umask": _umask(),
        "references": list(references),
        "path": list(path),
    }
    with contextlib.suppress(OSError), _connected({**environment, "OMP_NUM_THREADS": str(threads)}) as server:
        server.settimeout(_READY_SECONDS)
        _send(server, request, files)
        if _read_reply(server, 1, _READY_SECONDS) != _READY:
            return None
        # From here on either it is forked and says so, or nobody is there to be forked.
        server.sendall(_GO)
        said = _read_reply(server, 4)
        return int(struct.unpack("i", said)[0]) if len(said) == 4 else None
    return None


def working_folder() -> str:
    """The working folder for what this process starts: its own, or the root folder where that is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _read_reply(server: socket.socket, count: int, seconds: float = math.inf) -> bytes:
    """What the server says next; nothing where it is gone.

    :param seconds: how long it may take.
    :raises TimeoutError: when it takes longer.
    """
    pid, deadline = _peer(server)[0], time.monotonic() + seconds
    standstill = Standstill(lambda: pid)
    while not connection.wait([server], 1.0):
        standstill.look()
        if standstill.seconds > _HELD_UP_SECONDS:
            # What it has forked needs it no more; whoever asks next starts another.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif time.monotonic() > deadline:
            raise TimeoutError("the fork server does not answer")
    return server.recv(count)


@contextlib.contextmanager
def _connected(environment: Mapping[str, str]) -> Iterator[socket.socket]:
    """A connection to this user's server.

    :raises OSError: where there is none and none can be started.
    """
    kept = _kept(environment)
    address = _address(kept)
    deadline = time.monotonic() + _START_SECONDS
    started: subprocess.Popen[bytes] | None = None
    with socket.socket(socket.AF_UNIX) as server:
        while True:
            try:
                server.connect(address)
                break
            except ConnectionRefusedError:
                if started is None:
                    started = _launch(address, kept)
                if time.monotonic() > deadline or started.poll() not in (None, 0):
                    raise
                time.sleep(0.02)
        if not _is_own(*_peer(server)):
            raise PermissionError("the fork server belongs to another user, or is of another container")
        yield server


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the server gets, of those that runs get."""
    return {
        name: value
        for name, value in environment.items()
        if name == _OF_SERVICES or not name.startswith(_NOT_READ_AT_IMPORT)
    }


def _launch(address: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "saturn_airflow.launch.fork_server", address.removeprefix(_PREFIX)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            # What is imported may ask for GPUs: through NVML that breaks nothing in what is forked later.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            **environment,
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONUNBUFFERED": "1",
        },
        cwd=working_folder(),
        start_new_session=True,
    )


def _address(environment: Mapping[str, str]) -> str:
    """The abstract address of the server for this user, interpreter, code and environment.

    Containers that share a network namespace share these addresses, but not files: namespaces are part of it.
    So is what the server inherits from who starts it, and its working folder, where Python looks for modules
    first.
    """
    code = sorted(_states(str(Path(__file__).parents[1])))
    libraries = [os.stat(sysconfig.get_path(name)).st_mtime_ns for name in ("purelib", "platlib")]
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user")]
    own = [working_folder(), sys.executable, *_inherited()]
    facts = [own, code, libraries, namespaces, sorted(environment.items())]
    return _PREFIX + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _states(folder: str) -> Iterator[tuple[str, int, int, int]]:
    """Of each Python file below ``folder`` what changes when it is written, even where its time of change is
    set to what it was."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _states(entry.path)
        elif entry.name.endswith(".py"):
            found = entry.stat()
            yield entry.path, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _inherited() -> list[str]:
    """What this process would hand on to one it starts, in the kernel's words."""
    process = Path("/proc/self")
    whole = [(process / name).read_text() for name in _INHERITED if (process / name).exists()]
    status = (process / "status").read_text().splitlines()
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return [*whole, *(line for line in status if line.startswith(_INHERITED_STATUS)), str(nice)]


def _peer(end: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    process, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def _is_own(process: int, user: int) -> bool:
    """Whether a peer is this user's, and in this container.

    Of a process outside of it the kernel tells no id (0); one in a container below this has another id there.
    """
    if process == 0 or user != os.geteuid():
        return False
    # NSpid, in proc_pid_status(5): all its ids, from here on downwards.
    ids = _status(process, "NSpid:")
    return not ids or ids == [str(process)]


def _send(end: socket.socket, request: Mapping[str, Any], files: Sequence[int]) -> None:
    data = json.dumps(request).encode()
    socket.send_fds(end, [struct.pack("I", len(data))], list(files))
    end.sendall(data)


def _receive(end: socket.socket, head: bytes) -> dict[str, Any]:
    with end.makefile("rb") as stream:
        request: dict[str, Any] = json.loads(stream.read(struct.unpack("I", head)[0]))
        return request


def _umask() -> int:
    return int(_status("self", "Umask:")[0], 8)


def _status(process: int | str, field: str) -> list[str]:
    """What the kernel tells of a process under a name; nothing where it tells nothing of the kind.

    :raises OSError: when there is no such process.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((line.split()[1:] for line in lines if line.startswith(field)), [])


def serve(name: str) -> None:
    """Be the server called ``name``, until nobody has asked for anything for a while."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_PREFIX + name)
        except OSError:
            return  # another one was faster
        listener.listen(1024)
        os.chdir("/")
        from saturn_airflow.launch import warm

        warm.import_all()
        # Whoever ends is not waited for: the kernel sees to it.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while warm.why_not_to_fork() is None and connection.wait([listener], _IDLE_SECONDS):
            end, _ = listener.accept()
            with end, contextlib.suppress(OSError, ValueError, struct.error):
                _answer(listener, end)


def _answer(listener: socket.socket, end: socket.socket) -> None:
    asker, user = _peer(end)
    if not _is_own(asker, user):
        return
    end.settimeout(_ASKING_SECONDS)
    head, files, _, _ = socket.recv_fds(end, 4, 16)
    try:
        # Whatever fails from here on, the files must not stay open: the run would look alive.
        request = _receive(end, head)
        from saturn_airflow.launch import warm

        warm.import_for(request["references"], request["path"])
        if warm.why_not_to_fork() is not None:
            return
        end.sendall(_READY)
        if end.recv(1) != _GO:
            return
        # What is frozen is never collected, so that nothing the child closes is closed twice.
        gc.freeze()
        if os.fork() == 0:
            listener.close()
            run_and_exit(lambda: _become_supervisor(request, files, end, asker))
        gc.unfreeze()
    finally:
        for file in files:
            os.close(file)


def _become_supervisor(request: Mapping[str, Any], files: list[int], end: socket.socket, asker: int) -> None:
    """What the forked process does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process_above.go_on_below(lambda: _be_called([process_above.__name__, *request["arguments"]]))
    forked.may_fork = True
    os.setsid()
    output, _, *private = files
    for standard in (1, 2):
        os.dup2(output, standard)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None
    starter = os.pidfd_open(asker)
    end.sendall(struct.pack("i", os.getpid()))
    end.close()
    from saturn_airflow.launch import handed_over, supervisor

    handed_over.keep(handed_over.read(private))
    _be_called(["saturn_airflow.launch.supervisor", *request["arguments"]])
    supervisor.Supervisor(Path(request["arguments"][0]), starter).run()


def _be_called(words: Sequence[str]) -> None:
    """Show these words where processes are listed, if setproctitle is installed (Airflow brings it)."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(" ".join([sys.executable, "-m", *words]))


if __name__ == "__main__":
    # Forked processes must meet this module under the name that others import it by.
    from saturn_airflow.launch import fork_server

    fork_server.serve(sys.argv[1])
