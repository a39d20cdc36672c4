"""Runs: one job under one strategy, trained or tried in processes of their own, followed from outside.

A run has a folder with ``spec.json`` (what was asked), ``events.jsonl`` (what happened, one JSON object a
line) and ``output.log`` (what the processes printed). Whoever starts a run need not import torch, and need
not stay: a run that outlives its starter is found again by its folder, and followed from where the one
before stopped reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from saturn_airflow.launch import devices, environment, event_file, fork_server, handed_over
from saturn_airflow.launch.event_file import Event as Event
from saturn_airflow.launch.handed_over import NOTHING, HandedOver
from saturn_airflow.launch.run_spec import RunSpec as RunSpec
from saturn_airflow.launch.run_spec import read_spec as read_spec
from saturn_airflow.launch.standstill import Standstill, is_held_up, parent_of
from saturn_airflow.model import disks
from saturn_airflow.model.errors import DiskError, InvalidSweepError
from saturn_airflow.model.folders import TECHNIQUES_VARIABLE

log = logging.getLogger(__name__)

# What a supervisor may need to end a run that did not stop in time, and to say so.
_SUPERVISOR_SECONDS = 5.0
# Who follows a job and is held up by a signal for so long is ended by the next try, which waits for it.
_FOLLOWER_SECONDS = 10.0
#: How long a GPU may fail before that counts against the jobs that meet it.
_GPU_MENDED_SECONDS = 1800.0


class Run:
    """A run that was started, or found again."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        #: The run's own folder.
        self.folder = folder
        #: Where :meth:`events` reads on, in bytes.
        self.offset = 0
        self._process = process

    @property
    def log(self) -> Path:
        """What the run's processes printed."""
        return self.folder / "output.log"

    @property
    def spec(self) -> RunSpec:
        """What was asked of it.

        :raises NewerFormatError: when a newer version wrote it in a way that this one can't read.
        """
        return read_spec(self.folder)

    def exists(self) -> bool:
        """Whether it is where it was; the training it is of may have been set aside."""
        return (self.folder / "spec.json").exists()

    def is_alive(self) -> bool:
        """Whether its supervisor is there."""
        return _is_locked(self.folder / "alive")

    @property
    def end(self) -> Event | None:
        """How it ended: its ``end`` event, or one with status ``lost`` where its supervisor left without a
        word. None for as long as it is alive."""
        if self.is_alive():
            return None
        if (said := event_file.ending(self.folder)) is not None:
            return said
        end: Event = {"event": "end", "time": time.time(), "status": "lost", "traceback": "", "result": {}}
        if not self.exists():
            return {**end, "reason": f"somebody has taken {self.folder} away, so that it can't go on"}
        end["reason"] = "the run's supervisor is gone without a word; " + self._last_words()
        try:
            disks.check_room(self.folder)
        except DiskError as error:
            end |= {"reason": f"{end['reason']}; {error}", "whose": "node"}
        return end

    def events(
        self,
        poll: float = 0.1,
        give_up: Callable[[], bool] = lambda: False,
        kept: Callable[[], bool] = lambda: True,
    ) -> Iterator[Event]:
        """Follow the run: everything that happens, up to and including its ``end``.

        Each event is a mapping with ``event`` (its name) and ``time`` (seconds since the epoch). A run whose
        supervisor vanished ends with status ``lost``. One whose supervisor a signal holds up on this machine
        is told of with a ``warning`` and ended after :attr:`RunSpec.hang_seconds`: nobody else would. How far
        was read is noted, at most once a second, for whoever follows next; an event counts as read when the
        next one is asked for.

        :param poll: seconds between looks.
        :param give_up: asked at every look; when it says True, following ends without an ``end``.
        :param kept: whether what came of the events is kept, so that whoever follows next need not read them.
        """
        read, noted_at = self.offset, -math.inf
        standstill = Standstill(self._pid)
        try:
            while True:
                # Asked before reading: what a supervisor wrote last is read before it counts as gone.
                alive = self.is_alive()
                for event in self._new_events():
                    if event["event"] == "end":
                        self._wait_until_gone(5.0)
                        yield event
                        return
                    yield event
                    read = self.offset
                if not alive:
                    self._wait_until_gone(0.0)
                    end = self.end
                    if end is not None and end["status"] == "lost":
                        yield end
                    return
                if give_up():
                    return
                if message := standstill.look():
                    yield {"event": "warning", "time": time.time(), "message": f"the supervisor's {message}"}
                if standstill.seconds and standstill.seconds > self.spec.hang_seconds:
                    self.kill()
                if time.monotonic() - noted_at >= 1.0:
                    noted_at = time.monotonic()
                    self._note(read if kept() else None)
                time.sleep(poll)
        finally:
            self._note(read if kept() else None)

    def read_on(self) -> None:
        """Let :meth:`events` begin where the last one who followed this run had come to."""
        with contextlib.suppress(OSError, ValueError):
            followed = int((self.folder / "followed").read_text())
            # A damaged note must not hide what is to come: what was read already comes once more.
            said = (self.folder / event_file.NAME).stat().st_size
            self.offset = followed if 0 <= followed <= said else 0

    def so_far(self) -> list[Event]:
        """Everything that has happened; how far anybody has followed is not changed."""
        return list(Run(self.folder)._new_events())

    def has_saved(self) -> bool:
        """Whether it has written a checkpoint."""
        return any(event["event"] == "checkpoint" for event in self.so_far())

    def done_with(self) -> None:
        """Note that nobody need follow this run again: what it said last has been dealt with, too."""
        self._note(self.offset)

    def wait(self) -> Event:
        """Follow the run to its end and return that event."""
        *_, end = self.events()
        return end

    def give_up(self) -> None:
        """Note that no further try of its task goes on from it by itself."""
        with contextlib.suppress(OSError):
            (self.folder / "given_up").touch()

    def is_given_up(self) -> bool:
        """Whether somebody has noted that; a run that a user has started since is another one."""
        return (self.folder / "given_up").exists()

    def ask_to_stop(self) -> None:
        """Ask the run to checkpoint and leave, on whatever machine; its supervisor keeps the time."""
        with contextlib.suppress(OSError):
            (self.folder / "stop").touch()
        if pid := self._pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def is_told_to_stop(self) -> bool:
        """Whether somebody has asked it to."""
        return (self.folder / "stop").exists()

    def stop(self, timeout: float | None = None) -> None:
        """Ask the run to checkpoint and leave, and return when it is gone.

        A run on another machine that shares the folder is asked, too, but can't be ended from here.

        :param timeout: seconds after which it is ended; by default somewhat after its supervisor should have
            done that (:attr:`RunSpec.stop_seconds`).
        """
        if not self.is_alive():
            return
        self.ask_to_stop()
        self._wait_until_gone(self.spec.stop_seconds + _SUPERVISOR_SECONDS if timeout is None else timeout)
        self.kill()

    def kill(self) -> None:
        """End the run at once, all its processes; only on the machine it runs on."""
        pid = self._pid()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._wait_until_gone(5.0)

    def _pid(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            if self.is_alive() and (self.folder / "host").read_text() == socket.gethostname():
                pid = int((self.folder / "alive").read_text())
                return pid if pid > 1 else None  # others would mean groups of processes, or all of them
        return None

    def _note(self, offset: int | None) -> None:
        """Note that the run is followed, and how far; the first alone with None."""
        # Not as a whole: the time of the file is what counts, on a full disk too.
        with contextlib.suppress(OSError):
            path = self.folder / "followed"
            path.touch() if offset is None else path.write_text(str(offset))

    def _wait_until_gone(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        # Waiting for the process itself could lock up in a signal handler that interrupted another wait.
        if self._process is not None:
            self._process.poll()

    def _new_events(self) -> Iterator[Event]:
        for event, follows in event_file.read(self.folder, self.offset):
            self.offset = follows
            if event is not None:
                yield event

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            # A job may print without end.
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                return f"it last printed {lines[-1]!r}"
        return "it printed nothing"


def start(spec: RunSpec, handed: HandedOver = NOTHING) -> Run:
    """Start a run in a process group of its own.

    :param handed: secrets for its processes.
    :raises DiskError: when its disk is full or fails.
    :raises InvalidSweepError: when its folder can't be written for another reason.
    """
    runs = Path(spec.folder) / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        disks.check_room(runs)
        with _new_folder(runs) as folder:
            disks.write_whole(folder / "spec.json", json.dumps(spec.to_dict()))
            (folder / "host").write_text(socket.gethostname())
            # Of what its supervisor writes first, no file is to be made.
            (folder / event_file.NAME).touch()
            return _start(spec, folder, handed)
    except OSError as error:
        if disks.is_fault(error):
            raise disks.fault(runs, error) from None
        raise InvalidSweepError(
            f"job {spec.job.name!r} can't be run in {spec.folder}: {error.strerror}; its state needs a "
            "folder that every node can write and lock, with room to spare"
        ) from None


def attach(folder: str | Path) -> Run | None:
    """The run of this job that is alive, if there is one.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    return next((run for run in reversed(all_of(folder)) if run.is_alive()), None)


def all_of(folder: str | Path) -> list[Run]:
    """All runs of a job so far, first to last.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    return [Run(path) for path in sorted((Path(folder) / "runs").glob("*")) if (path / "alive").exists()]


def has_asked(folder: str | Path, since: float) -> bool:
    """Whether a job has a run that holds its devices, waits for them, or has ended, under this plan; or has
    finished under an earlier one, and needs none.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    :param since: when the plan was made, in seconds since the epoch.
    """
    return any(
        run.spec.priority[0] >= since or (end := run.end) is None or end["status"] == "finished"
        for run in all_of(folder)
    )


def failures(folder: str | Path, counts: Callable[[Run], bool] = Run.exists, node: str | None = None) -> int:
    """How many runs of a job ended badly: not finished, and not because they were told to stop.

    One that was lost and had written a checkpoint does not count: its node went, and the job got on. Neither
    does what was the node's own fault, such as a full disk, nor what a GPU's hardware or driver did in the
    first half hour of it: drivers are reset in seconds, and tries would be used up by then.

    :param counts: whether a run is to be counted.
    :param node: where the job is now; what was lost elsewhere went with its node, and does not count.
    """
    count = 0
    gpu_failed_at: float | None = None
    for run in all_of(folder):
        end = run.end
        if end is None or end["status"] in ("finished", "stopped") or end.get("whose") == "node":
            continue
        if end.get("whose") != "device" or run.has_saved():
            gpu_failed_at = None
        elif (gpu_failed_at := gpu_failed_at or end["time"]) > end["time"] - _GPU_MENDED_SECONDS:
            continue
        lost = end["status"] == "lost" and (run.has_saved() or node not in (None, run.spec.node))
        count += not lost and counts(run)
    return count


@contextlib.contextmanager
def sole_follower(
    folder: str | Path, give_up: Callable[[], bool] = lambda: False, on_wait: Callable[[], object] = int
) -> Iterator[bool]:
    """Be the only one who follows a job's runs and passes on what they say; others wait.

    One on this machine that a signal holds up (SIGSTOP) would be waited for for ever, and is ended. So is
    one under a process that is held up, which is Airflow's, and has been given up.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    :param give_up: asked again and again; when it says True the wait ends.
    :param on_wait: called once where there is somebody to wait for.
    :returns: whether this is the one; False when ``give_up`` said so.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / "follower", "a+") as file:

        def held_up() -> int | None:
            """The follower, or the process above it, whichever is held up."""
            if (pid := follower(folder)) is None:
                return None
            return parent_of(pid) if is_held_up(parent_of(pid)) else pid

        standstill = Standstill(held_up)

        def look() -> bool:
            if message := standstill.look():
                log.warning("An earlier try follows the training, and %s", message)
            if standstill.seconds > _FOLLOWER_SECONDS and (pid := follower(folder)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return give_up()

        alone = wait_for_lock(file, look, on_wait)
        if alone:
            with contextlib.suppress(OSError):
                file.truncate(0)
                os.write(file.fileno(), f"{socket.gethostname()} {os.getpid()}".encode())
        yield alone


def follower(folder: str | Path) -> int | None:
    """The process of this machine that follows a job's runs, if there is one.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    path = Path(folder) / "follower"
    with contextlib.suppress(OSError, ValueError):
        host, pid = path.read_text().split()
        # Who followed before has left its number there, which may be anyone's by now.
        if host == socket.gethostname() and int(pid) > 1 and _is_locked(path):
            return int(pid)
    return None


def wait_for_lock(file: IO[str] | int, give_up: Callable[[], bool], on_wait: Callable[[], object]) -> bool:
    """Lock an open file for this process alone.

    :param give_up: asked ten times a second; when it says True the wait ends.
    :param on_wait: called once where another process holds the lock.
    :returns: whether it is locked; False when ``give_up`` said so.
    """
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not told:
                on_wait()
                told = True
            if give_up():
                return False
            time.sleep(0.1)


def _start(spec: RunSpec, folder: Path, handed: HandedOver) -> Run:
    folders = [*spec.technique_folders, os.environ.get(TECHNIQUES_VARIABLE, "")]
    passed, kept_back = environment.for_users_code(os.environ)
    if kept_back:
        log.warning("%s", environment.told(kept_back))
    variables = passed | {
        "PYTHONUNBUFFERED": "1",
        TECHNIQUES_VARIABLE: os.pathsep.join(filter(None, folders)),
    }
    job = spec.job
    references = map(str, filter(None, [job.load_model, job.load_dataloader, job.loss_function]))
    process: subprocess.Popen[bytes] | None = None
    with (
        open(folder / "alive", "w") as alive,
        open(folder / "output.log", "ab") as output,
        handed_over.as_file(handed) as private,
    ):
        # The lock lives as long as the supervisor, from before its first instruction on.
        fcntl.flock(alive, fcntl.LOCK_EX)
        # Once it runs no full disk is in the way of its number: it has its place.
        alive.write(" " * 20)
        alive.flush()
        pid = fork_server.start(
            [str(folder)],
            variables,
            [output.fileno(), alive.fileno(), *private],
            list(references),
            spec.path,
            devices.threads_per_device(spec.slots),
        )
        if pid is None:
            # A new interpreter, because what Airflow forks must never meet CUDA.
            arguments = [str(folder), str(os.getpid()), *map(str, private)]
            process = subprocess.Popen(
                [sys.executable, "-m", "saturn_airflow.launch.supervisor", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
                pass_fds=[alive.fileno(), *private],
            )
            pid = process.pid
        with contextlib.suppress(OSError):
            os.pwrite(alive.fileno(), str(pid).encode(), 0)
    return Run(folder, process)


def time_on_devices(folder: str | Path, counts: Callable[[Run], bool] = Run.exists) -> dict[str, float]:
    """When a job had its devices, over all its runs so far.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    :param counts: whether a run is to be counted.
    :returns: ``started_at`` and ``ended_at`` (seconds since the epoch) and ``actual_seconds`` (held in all);
        empty where it never had any.
    """
    started, ended, held = [], [], 0.0
    for run in filter(counts, all_of(folder)):
        events, since = run.so_far(), None
        for event in events:
            if event["event"] == "leased" and since is None:
                since = event
                started.append(since["time"])
            elif since is not None and (event["event"] == "gave_way" or event is events[-1]):
                ended.append(event["time"])
                held += _seconds_between(since, event)
                since = None
        if since is not None:
            ended.append(since["time"])
    return {"started_at": min(started), "ended_at": max(ended), "actual_seconds": held} if started else {}


def _seconds_between(first: Event, then: Event) -> float:
    """Between two events of a run, whatever has been done to the machine's clock."""
    # Runs of earlier versions have the time of day alone.
    by = "clock" if "clock" in first and "clock" in then else "time"
    return float(then[by] - first[by])


def last_checkpoint(folder: str | Path) -> Event | None:
    """The ``checkpoint`` event (``step``, ``path``) of the last checkpoint that a job wrote.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    saved = None
    for run in all_of(folder):
        saved = next((e for e in reversed(run.so_far()) if e["event"] == "checkpoint"), saved)
    return saved


@contextlib.contextmanager
def _new_folder(runs: Path) -> Iterator[Path]:
    """The folder of one more run; it goes where the run can't be started."""
    last = max((int(path.name) for path in runs.iterdir() if path.name.isdigit()), default=0)
    for number in itertools.count(last + 1):
        folder = runs / f"{number:04}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    try:
        yield folder
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_locked(path: Path) -> bool:
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
