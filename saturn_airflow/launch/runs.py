"""Runs: one job under one strategy, trained or tried in processes of their own, followed from outside.

A run has a folder with ``spec.json`` (what was asked), ``events.jsonl`` (what happened, one JSON object a
line) and ``output.log`` (what the processes printed). Whoever starts a run need not import torch, and need
not stay: a run that outlives its starter is found again by its folder, and followed from where the one
before stopped reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from saturn_airflow.launch import devices, environment, event_file, fork_server, handed_over, this_machine
from saturn_airflow.launch.event_file import Event as Event
from saturn_airflow.launch.followed_run import Run as Run
from saturn_airflow.launch.followed_run import all_of as all_of
from saturn_airflow.launch.followed_run import attach as attach
from saturn_airflow.launch.handed_over import NOTHING, HandedOver
from saturn_airflow.launch.run_spec import RunSpec as RunSpec
from saturn_airflow.launch.run_spec import read_spec as read_spec
from saturn_airflow.model import disks
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.folders import TECHNIQUES_VARIABLE

log = logging.getLogger(__name__)


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
            (folder / "host").write_text(this_machine.name())
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


@functools.cache
def _say_kept_back(names: tuple[str, ...]) -> None:
    """Say once in each process which variables jobs don't get: a trial starts many runs."""
    if names:
        log.info("%s", environment.told(list(names)))


def _start(spec: RunSpec, folder: Path, handed: HandedOver) -> Run:
    folders = [*spec.technique_folders, os.environ.get(TECHNIQUES_VARIABLE, "")]
    passed, kept_back = environment.for_users_code(os.environ)
    _say_kept_back(tuple(kept_back))
    # Sets of texts are gone through in one order in all processes: by it jobs number words and classes.
    variables = (
        {"PYTHONHASHSEED": "0"}
        | passed
        | {
            "PYTHONUNBUFFERED": "1",
            TECHNIQUES_VARIABLE: os.pathsep.join(filter(None, folders)),
        }
    )
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
            process, pid = _start_interpreter(folder, variables, output, [alive.fileno(), *private])
        with contextlib.suppress(OSError):
            os.pwrite(alive.fileno(), str(pid).encode(), 0)
    return Run(folder, process)


def _start_interpreter(
    folder: Path, variables: dict[str, str], output: IO[bytes], files: list[int]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a supervisor in a new interpreter, because what Airflow forks must never meet CUDA.

    :param files: what :func:`fork_server.start` gets, without the one for its output.
    :returns: the process above it, and its process id.
    """
    reading, writing = os.pipe()
    with open(reading, "rb") as answer:
        try:
            arguments = [str(folder), str(os.getpid()), *map(str, [writing, *files[1:]])]
            process = subprocess.Popen(
                [sys.executable, "-m", "saturn_airflow.launch.supervisor", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                cwd=fork_server.working_folder(),
                start_new_session=True,
                pass_fds=[writing, *files],
            )
        finally:
            os.close(writing)
        said = answer.read(4)
    # One that ends before it says so has nothing below it.
    return process, struct.unpack("i", said)[0] if len(said) == 4 else process.pid


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
