"""Services as local processes, each with a log and a process group of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from saturn_airflow.model.errors import SaturnError

HOST = "127.0.0.1"
#: In the environment of a service and of all it starts: whose they are.
MARK = "SATURN_SERVICE"


@dataclass(frozen=True)
class Start:
    """How a process is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None
    once: bool


class Processes:
    """Named processes that can be ended and started again, one by one or all together.

    :param logs: folder of their logs, ``<name>.log``; made when it is not there.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._starts: dict[str, Start] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def launch(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        once: bool = False,
    ) -> None:
        """Start a process.

        :param folder: its working folder.
        :param once: it does its work and ends; see :meth:`finish`.
        :raises SaturnError: when there is no such program.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        self._starts[name] = Start(tuple(command), environment, folder, once)
        with (self.logs / f"{name}.log").open("ab") as log:
            try:
                self._running[name] = subprocess.Popen(
                    command,
                    env={**environment, MARK: self._mark(name)},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                # To be found again should this process be killed before it has ended them.
                (self.logs / f"{name}.pid").write_text(_identity(self._running[name].pid) or "")
            except FileNotFoundError:
                raise SaturnError(f"{name} can't be started: there is no program {command[0]!r}") from None

    def finish(self, name: str) -> None:
        """Wait for a process that does its work and ends.

        :raises SaturnError: when it fails, with the end of its log.
        """
        process = self._running.pop(name)
        if process.wait() != 0:
            raise SaturnError(f"`{' '.join(self._starts[name].command)}` failed:\n{self.tail(name)}")

    def ended(self, name: str) -> int | None:
        """A process's exit status once it has ended, None before that."""
        return self._running[name].poll()

    def pid(self, name: str) -> int:
        """The id of a service's main process, which is that of its process group too."""
        return self._running[name].pid

    def running(self) -> list[str]:
        """Names of what was launched and neither finished nor killed."""
        return list(self._running)

    def kill(self, name: str, sign: int = signal.SIGKILL, everything: bool = False) -> None:
        """End one service as a fault would, and wait until its main process is gone.

        :param everything: also what the service started in sessions of its own, as when a container or a
            whole machine goes.
        """
        process = self._running.pop(name)
        _signal_group(process.pid, sign)
        process.wait()
        if everything:
            self.end_marked(name)

    def start_again(self, name: str, changed: Mapping[str, str] | None = None) -> None:
        """Start a service again that was killed, as it was started before.

        :param changed: variables of its environment that differ from now on.
        """
        assert name not in self._running, f"{name} is running"
        start = self._starts[name]
        environment = {**start.environment, **(changed or {})}
        self.launch(name, start.command, environment, start.folder, start.once)

    def pause(self, name: str) -> None:
        """Let a service hang: its processes stay, and do nothing."""
        _signal_group(self._running[name].pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a paused service go on."""
        _signal_group(self._running[name].pid, signal.SIGCONT)

    def check(self, spared: Collection[str] = ()) -> None:
        """Raise when a service has ended by itself.

        :param spared: services that may.
        :raises SaturnError: naming the service, with the end of its log.
        """
        for name, process in self._running.items():
            if name not in spared and process.poll() is not None and not self._starts[name].once:
                raise SaturnError(f"{name} ended with exit status {process.returncode}:\n{self.tail(name)}")

    def stop(
        self,
        names: Sequence[str] | None = None,
        signs: Mapping[str, int] | None = None,
        patience: float = 10.0,
    ) -> None:
        """End services and whatever they started: politely, and after ``patience`` seconds at once.

        :param names: which; all by default.
        :param signs: the polite signal of those that need another than SIGTERM.
        """
        ending = {name: self._running[name] for name in self._running if names is None or name in names}
        for polite, seconds in ((True, patience), (False, 5.0)):
            for name, process in ending.items():
                if process.poll() is None:
                    sign = (signs or {}).get(name, signal.SIGTERM)
                    _signal_group(process.pid, signal.SIGCONT)
                    _signal_group(process.pid, sign if polite else signal.SIGKILL)
            deadline = time.monotonic() + seconds
            for process in ending.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        for name, process in ending.items():
            _signal_group(process.pid, signal.SIGKILL)  # what a main process left in its group
            self.end_marked(name)
            del self._running[name]
        deadline = time.monotonic() + 5.0
        while any(_is_group(process.pid) for process in ending.values()) and time.monotonic() < deadline:
            time.sleep(0.02)

    def tail(self, name: str, lines: int = 30) -> str:
        """The end of a service's log."""
        path = self.logs / f"{name}.log"
        text = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(text[-lines:])

    def marked(self, name: str) -> list[int]:
        """Ids of live processes that a service started, whatever their session.

        Those are missing that overwrote their environment with a title, as Airflow's and Celery's do; they
        stay in the service's process group.
        """
        return list(_with_environment(f"{MARK}={self._mark(name)}"))

    def end_marked(self, name: str) -> None:
        """End all that a service started, now or in an earlier life of this folder."""
        note = self.logs / f"{name}.pid"
        identity = note.read_text(errors="replace") if note.exists() else ""
        if re.fullmatch(r"[1-9]\d* \d+", identity):
            group = int(identity.split()[0])
            if _identity(group) == identity:
                _signal_group(group, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while (left := self.marked(name)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _mark(self, name: str) -> str:
        """What :data:`MARK` is set to for a service: no other folder's services have the same."""
        return str(self.logs.resolve() / name)


def free_port(usual: int) -> int:
    """``usual`` when nobody listens there, else a port the system chooses.

    No other process that asks here gets it while this one lives: its service may take a minute to listen.

    :raises SaturnError: when none of twenty that the system chooses is free of such claims.
    """
    for port in (usual, *[0] * 20):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((HOST, port))
                found = int(probe.getsockname()[1])
                if _reserve(found):
                    return found
    raise SaturnError("this machine has no free port")


#: Sockets whose names are this process's claims to ports: they go with it, and leave no file.
_claims: dict[int, socket.socket] = {}


def _reserve(port: int) -> bool:
    """Claim a port by an abstract Unix socket's name (Linux); False where a process has it, this one too."""
    if port in _claims:
        return False
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0saturn-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims[port] = claim
    return True


def end_on_signals() -> None:
    """Let signals that end a process run its ``finally`` blocks, so that what it started ends too."""
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, lambda number, _: sys.exit(128 + number))
    # A shell starts what runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(group: int, sign: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, sign)


def _identity(pid: int) -> str | None:
    """A live process's id and when it started, in clock ticks since boot; ids alone come back."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{pid} {fields[19]}"


def _with_environment(entry: str) -> Iterator[int]:
    """Ids of live processes that were started with ``NAME=value`` in their environment; never this one."""
    wanted = entry.encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                environment = (folder / "environ").read_bytes().split(b"\0")
                # An ended process that nobody has waited for has no environment any more.
                if wanted in environment:
                    yield int(folder.name)
