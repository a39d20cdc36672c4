"""A run as its folder tells of it: what happened, whether it is alive, and how it is asked to stop."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from saturn_airflow.launch import event_file, this_machine
from saturn_airflow.launch.event_file import Event
from saturn_airflow.launch.file_locks import is_locked
from saturn_airflow.launch.run_spec import RunSpec, read_spec
from saturn_airflow.launch.standstill import Standstill
from saturn_airflow.model import disks
from saturn_airflow.model.errors import DiskError
from saturn_airflow.model.status import Status

# What a supervisor may need to end a run that did not stop in time, and to say so.
_SUPERVISOR_SECONDS = 5.0


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
        return is_locked(self.folder / "alive")

    @property
    def end(self) -> Event | None:
        """How it ended: its ``end`` event, or one with status ``lost`` where its supervisor left without a
        word. None for as long as it is alive."""
        if self.is_alive():
            return None
        if (said := event_file.ending(self.folder)) is not None:
            return said
        end: Event = {
            "event": "end",
            "time": time.time(),
            "status": Status.LOST,
            "traceback": "",
            "result": {},
        }
        if not self.exists():
            return {**end, "reason": f"somebody has taken {self.folder} away, so that it can't go on"}
        end["reason"] = "the run's supervisor is gone without a word; " + self._end_of_output()
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
                    if end is not None and end["status"] == Status.LOST:
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
        """Note that nobody need follow this run again: all of its events have been dealt with."""
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
            if self.is_alive() and this_machine.is_meant((self.folder / "host").read_text()):
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

    def _end_of_output(self) -> str:
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            # A job may print without end.
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                return f"it last printed {lines[-1]!r}"
        return "it printed nothing"


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
