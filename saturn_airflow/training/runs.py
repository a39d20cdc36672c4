"""Runs: one job under one strategy, trained or tried in processes of their own, followed from outside.

A run has a folder with ``spec.json`` (what was asked), ``events.jsonl`` (what happened, one JSON object a
line) and ``output.log`` (what the processes printed). Whoever starts a run need not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from saturn_airflow import library
from saturn_airflow.errors import InvalidSweepError
from saturn_airflow.jobs import Job
from saturn_airflow.training.request import Measure

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run does, where, and on which devices. Plain data that fits in JSON.

    :param folder: the state of this job in this sweep: ``checkpoints/``, and ``runs/`` with a folder each.
    :param node: the name of the node this machine is.
    :param slots: how many devices the node has; CPU threads are split among them.
    :param devices: how many devices the job takes.
    :param device_ids: exactly these; None for any that are free.
    :param kind: ``"cpu"`` for CPU slots, else a type of GPU.
    :param priority: smaller goes first where devices are waited for: when the plan was made (seconds since
        the epoch), place in the plan.
    :param holder: who holds the devices, in words for people.
    :param mode: ``"train"``, or ``"trial"`` to measure.
    :param batch_count: global batches to train for in this run; None for all that are left.
    :param checkpoint_seconds: save a checkpoint when the last one is this old.
    :param checkpoint_batches: save a checkpoint every so many global batches.
    :param leases_folder: where the node's device locks are; None for the node's default.
    :param technique_folders: folders of the user's techniques.
    :param path: folders of the user's modules, put at the end of the module search path.
    :param measure: how a trial measures.
    :param trial_seconds: how long a trial may take, once it has its devices.
    :param hang_seconds: training in which nothing moved for this long is ended.
    :param stop_seconds: how long training may take to stop when asked to.
    :param outlive_seconds: how long the run goes on when nobody follows it; 0 ends it with its starter.
    """

    job: Job
    technique: str
    folder: str
    node: str
    slots: int
    devices: int
    device_ids: tuple[int, ...] | None = None
    kind: str = "gpu"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    priority: tuple[float, int] = (0.0, 0)
    holder: str = ""
    mode: Literal["train", "trial"] = "train"
    batch_count: int | None = None
    checkpoint_seconds: float | None = 60.0
    checkpoint_batches: int | None = None
    keep_checkpoints: int = 2
    leases_folder: str | None = None
    technique_folders: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    measure: Measure = field(default_factory=Measure)
    trial_seconds: float = 120.0
    hang_seconds: float = 1800.0
    stop_seconds: float = 60.0
    outlive_seconds: float = 0.0

    def __post_init__(self) -> None:
        what = f"job {self.job.name!r}"
        if not 1 <= self.devices <= self.slots:
            raise InvalidSweepError(
                f"{what} asks for {self.devices} devices; node {self.node!r} has {self.slots}"
            )
        ids = self.device_ids
        if ids is not None and (len(set(ids)) != self.devices or not all(0 <= i < self.slots for i in ids)):
            raise InvalidSweepError(
                f"{what}: device ids {list(ids)} are not {self.devices} of the {self.slots} "
                f"of node {self.node!r}"
            )
        if not self.holder:
            object.__setattr__(self, "holder", what)

    def to_dict(self) -> dict[str, Any]:
        """This spec as JSON-ready data."""
        return {**asdict(self), "job": self.job.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunSpec:
        """The spec that :meth:`to_dict` described."""
        fields = dict(data)
        fields["job"] = Job.from_dict(fields["job"])
        fields["measure"] = Measure(*fields["measure"])
        for name in ("priority", "technique_folders", "path"):
            fields[name] = tuple(fields[name])
        if fields["device_ids"] is not None:
            fields["device_ids"] = tuple(fields["device_ids"])
        return cls(**fields)


class Run:
    """A run that was started, or found again."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        #: The run's own folder.
        self.folder = folder
        #: Where :meth:`events` reads on, in bytes; keep it to read on after a reconnect.
        self.offset = 0
        self._process = process

    @property
    def log(self) -> Path:
        """What the run's processes printed."""
        return self.folder / "output.log"

    def is_alive(self) -> bool:
        """Whether its supervisor is there."""
        return _is_locked(self.folder / "alive")

    def events(self, poll: float = 0.1) -> Iterator[Event]:
        """Follow the run: everything that happens, up to and including its ``end``.

        Each event is a mapping with ``event`` (its name) and ``time`` (seconds since the epoch). A run whose
        supervisor vanished ends with status ``lost``.

        :param poll: seconds between looks.
        """
        while True:
            # Asked before reading: what a supervisor wrote last is read before it counts as gone.
            alive = self.is_alive()
            for event in self._new_events():
                if event["event"] == "end":
                    self._wait_until_gone(5.0)
                    yield event
                    return
                yield event
            if not alive:
                self._wait_until_gone(0.0)
                yield {
                    "event": "end",
                    "time": time.time(),
                    "status": "lost",
                    "reason": "the run's supervisor is gone without a word; " + self._last_words(),
                    "traceback": "",
                    "result": {},
                }
                return
            with contextlib.suppress(OSError):
                (self.folder / "follower").touch()
            time.sleep(poll)

    def wait(self) -> Event:
        """Follow the run to its end and return that event."""
        *_, end = self.events()
        return end

    def stop(self, timeout: float = 60.0) -> None:
        """Ask the run to checkpoint and leave; end it after ``timeout`` seconds. Returns when it is gone."""
        pid = self._pid()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        self._wait_until_gone(timeout)
        self.kill()

    def kill(self) -> None:
        """End the run at once, all its processes."""
        pid = self._pid()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._wait_until_gone(5.0)

    def _pid(self) -> int | None:
        if not self.is_alive():
            return None
        text = (self.folder / "alive").read_text()
        return int(text) if text else None

    def _wait_until_gone(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        # Waiting for the process itself could lock up in a signal handler that interrupted another wait.
        if self._process is not None:
            self._process.poll()

    def _new_events(self) -> Iterator[Event]:
        try:
            with open(self.folder / "events.jsonl", "rb") as file:
                file.seek(self.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self.offset += len(line)
                    yield json.loads(line)
        except FileNotFoundError:
            return

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            if lines:
                return f"it last printed {lines[-1]!r}"
        return "it printed nothing"


def start(spec: RunSpec) -> Run:
    """Start a run in a process group of its own.

    :raises InvalidSweepError: when its folder can't be written.
    """
    try:
        folder = _new_folder(Path(spec.folder) / "runs")
        (folder / "spec.json").write_text(json.dumps(spec.to_dict()))
        return _start(spec, folder)
    except OSError as error:
        raise InvalidSweepError(
            f"job {spec.job.name!r} can't be run in {spec.folder}: {error.strerror}; its state needs a "
            "folder that every node can write and lock, with room to spare"
        ) from None


def attach(folder: str | Path) -> Run | None:
    """The run of this job that is alive, if there is one.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    for run_folder in sorted((Path(folder) / "runs").glob("*"), reverse=True):
        run = Run(run_folder)
        if run.is_alive():
            return run
    return None


def _start(spec: RunSpec, folder: Path) -> Run:
    folders = [*spec.technique_folders, os.environ.get(library.FOLDERS_VARIABLE, "")]
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        library.FOLDERS_VARIABLE: os.pathsep.join(filter(None, folders)),
    }
    with open(folder / "alive", "w") as alive, open(folder / "output.log", "ab") as log:
        # The lock lives as long as the supervisor, from before its first instruction on.
        fcntl.flock(alive, fcntl.LOCK_EX)
        # A new interpreter, because what Airflow forks must never meet CUDA.
        process = subprocess.Popen(
            [sys.executable, "-m", "saturn_airflow.training.supervisor", str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            pass_fds=[alive.fileno()],
        )
        alive.write(str(process.pid))
    return Run(folder, process)


def time_on_devices(folder: str | Path) -> dict[str, float]:
    """When a job had its devices, over all its runs so far.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    :returns: ``started_at`` and ``ended_at`` (seconds since the epoch) and ``actual_seconds`` (held in all);
        empty where it never had any.
    """
    started, ended, held = [], [], 0.0
    for path in sorted((Path(folder) / "runs").glob("*")):
        events = list(Run(path)._new_events())
        leased = [event["time"] for event in events if event["event"] == "leased"]
        if leased:
            started.append(leased[0])
            ended.append(events[-1]["time"])
            held += events[-1]["time"] - leased[0]
    return {"started_at": min(started), "ended_at": max(ended), "actual_seconds": held} if started else {}


def _new_folder(runs: Path) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in runs.iterdir() if path.name.isdigit()), default=0)
    while True:
        try:
            (runs / f"{number:04}").mkdir()
            return runs / f"{number:04}"
        except FileExistsError:
            number += 1


def _is_locked(path: Path) -> bool:
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
