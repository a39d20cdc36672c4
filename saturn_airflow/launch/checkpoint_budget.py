"""What disk checkpoints may take, of one sweep and of all: what goes when it is more, and what never does.

First go those of trainings that another stands in for and what is damaged, then a job's older ones beside its
newest, then those of finished jobs, whose models are exported beside them; the oldest first each time. What
training leaves of a model as it was lies beside its checkpoints, and goes with the last of them. The last
whole checkpoint of a job that has not finished never goes, nor anything of a job that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from saturn_airflow.launch import checkpoint_files, file_locks, runs
from saturn_airflow.model.folders import SUPERSEDED
from saturn_airflow.model.status import Status

_LOCK = "checkpoints.lock"
#: In which order checkpoints go: the smallest first, the last never.
_SUPERSEDED, _OLDER, _FINISHED, _NEVER = range(4)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint, or what is left of one.

    :param bytes: that it takes on disk.
    :param written: when, in seconds since the epoch.
    :param order: in which it goes.
    :param newer: those newer ones of its job of which one must be whole for it to go.
    """

    path: Path
    bytes: int
    written: float
    order: int
    newer: tuple[Path, ...] = ()


@dataclass(frozen=True)
class KeptWithinBudget:
    """What came of keeping to a budget.

    :param removed: what was taken away.
    :param bytes: what checkpoints take now.
    :param over: whether that is still more than they may.
    """

    removed: tuple[Path, ...]
    bytes: int
    over: bool


def sweeps_of(home: Path) -> list[Path]:
    """The folders of all sweeps of a deployment."""
    return sorted(path for path in (home / "sweeps").glob("*/*/*") if path.is_dir())


def alone(home: Path) -> AbstractContextManager[bool]:
    """Be the only one in the deployment who takes checkpoints away; False where somebody else is at it."""
    return file_locks.alone(home / _LOCK)


def keep_to(budget: float, sweeps: Iterable[Path], why: str) -> KeptWithinBudget:
    """Take checkpoints away until those of ``sweeps`` take no more than ``budget`` bytes, or none may go.

    Whoever calls this is :func:`alone`.

    :param why: what is told to those who look for them.
    """
    jobs = [job for sweep in sweeps for job in _jobs(sweep)]
    for folder in [training / "checkpoints" for job in jobs for training in (job, *job.glob(SUPERSEDED))]:
        checkpoint_files.finish_removing(folder)
    found = [kept for job in jobs for kept in _checkpoints(job)]
    taken = sum(kept.bytes for kept in found)
    removed: list[Path] = []
    for kept in sorted(found, key=lambda kept: (kept.order, kept.written)):
        if taken <= budget or kept.order == _NEVER:
            break
        if kept.order == _OLDER and all(map(checkpoint_files.damage, kept.newer)):
            continue
        if _is_of_one_that_trains(kept.path):
            continue  # it began meanwhile
        # On a disk that can't be written, such as a read-only one, nothing can be taken away either.
        with contextlib.suppress(OSError):
            checkpoint_files.remove(kept.path)
            taken -= kept.bytes
            removed.append(kept.path)
            for base in checkpoint_files.unused(kept.path.parent):
                bytes_of_base = checkpoint_files.bytes_of(base)
                checkpoint_files.remove(base)
                taken -= bytes_of_base
                removed.append(base)
    for folder in {path.parent for path in removed}:
        names = [path.name for path in removed if path.parent == folder]
        checkpoint_files.note_removed(folder, names, why)
    return KeptWithinBudget(tuple(removed), taken, taken > budget)


def taken_by(sweeps: Iterable[Path]) -> int:
    """What the checkpoints of ``sweeps`` take on disk, in bytes."""
    return sum(kept.bytes for sweep in sweeps for job in _jobs(sweep) for kept in _checkpoints(job))


def _jobs(sweep: Path) -> list[Path]:
    return [path for path in sorted(sweep.iterdir()) if path.is_dir()] if sweep.is_dir() else []


def _is_of_one_that_trains(checkpoint: Path) -> bool:
    training = checkpoint.parent.parent
    return not training.match(SUPERSEDED) and runs.attach(training) is not None


def _checkpoints(job: Path) -> Iterator[KeptCheckpoint]:
    """The checkpoints of a job, with those of its trainings that others stand in for."""
    for folder in job.glob(f"{SUPERSEDED}/checkpoints"):
        yield from _with_bases([_kept(path, _SUPERSEDED) for path in folder.glob("*/")])
    yield from _with_bases(list(_present(job)))


def _with_bases(found: Sequence[KeptCheckpoint]) -> Iterator[KeptCheckpoint]:
    """The same, with what others need beside them staying as long as they do."""
    needed = {checkpoint_files.base_of(kept.path) for kept in found}
    for kept in found:
        yield replace(kept, order=_NEVER) if kept.path in needed else kept


def _present(job: Path) -> Iterator[KeptCheckpoint]:
    """The checkpoints of the job's present training."""
    there = [path for path in (job / "checkpoints").glob("*/") if path.is_dir()]
    if not there:
        return
    ends = [run.end for run in runs.all_of(job)]
    trains = any(end is None for end in ends)
    finished = bool(ends) and ends[-1] is not None and ends[-1]["status"] == Status.FINISHED
    steps = checkpoint_files.newest_first(there)
    for path in there:
        if trains or (path.match("step-*") and path not in steps):  # the latter somebody put there
            order = _NEVER
        elif path not in steps:  # damaged, refused, or only begun
            order = _SUPERSEDED
        elif finished:
            order = _FINISHED
        else:
            order = _NEVER if path == steps[0] else _OLDER
        newer = tuple(steps[: steps.index(path)]) if order == _OLDER else ()
        yield _kept(path, order, newer)


def _kept(path: Path, order: int, newer: Sequence[Path] = ()) -> KeptCheckpoint:
    written = 0.0
    with contextlib.suppress(OSError):
        written = path.stat().st_mtime
    return KeptCheckpoint(path, checkpoint_files.bytes_of(path), written, order, tuple(newer))
