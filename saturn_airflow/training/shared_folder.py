"""A folder that the ranks of a job write to together: what fails on one of them fails on all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from saturn_airflow.launch import checkpoint_files, rights
from saturn_airflow.model import disks, sizes
from saturn_airflow.model.errors import DiskError, JobError
from saturn_airflow.training import tensor_files
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.state import Tensors

#: How many more checkpoints, and how much of a disk, should still find room before the user is warned.
_ROOM_FOR, _ROOM = 3, 0.03
_MAKE_ROOM = "free some space ({}[saturn] checkpoints_budget and keep_sweeps_days take less)"


class CheckpointError(JobError):
    """A checkpoint that can't be written or read."""


class DiskOfCheckpointsError(CheckpointError, DiskError):
    """The same, where the disk is to blame."""


class SharedFolder:
    """A folder at ``path``, made if it is not there.

    :param group: whom ranks talk to each other through; None for the default.
    :param warn: called with what the user should know.
    :param keep: how many checkpoints stay in it.
    :raises CheckpointError: when it can't be written.
    """

    def __init__(
        self, path: Path, ranks: Ranks, group: Any, warn: Callable[[str], None], keep: int = 2
    ) -> None:
        self.path = path
        self._ranks = ranks
        self._group = group
        self._warn = warn
        self._make_room = _MAKE_ROOM.format("keep_checkpoints=1, " if keep > 1 else "")
        self._disk_is_short = False
        #: Bytes that were to be written last, and that the disk had for them.
        self._room: tuple[int, int] | None = None
        self._stuck: set[Path] = set()
        with self.explained():
            if ranks.is_first:
                path.mkdir(parents=True, exist_ok=True)
                trial = path / f".writable-{os.getpid()}"
                trial.touch()
                trial.unlink()

    def write(self, folder: Path, tensors: Tensors) -> dict[str, Any]:
        """Write tensors to a new folder.

        :returns: sizes and digests of all its files.
        """
        lengths = {name: n for part in self.everyones(lengths_of(tensors)) for name, n in part.items()}
        with self.explained():
            if self._ranks.is_first:
                # Somebody may have taken it away meanwhile.
                folder.mkdir(parents=True)
                self.look_at_disk(sum(lengths.values()))
        with self.explained():
            tensor_files.write(folder, tensors, lengths, self._group)
        own_files: dict[str, Any] = {}
        with self.explained():
            paths = sorted(folder.glob("*.safetensors"))[self._ranks.rank :: self._ranks.size]
            own_files = {path.name: tensor_files.describe(path) for path in paths}
        return {name: described for part in self.everyones(own_files) for name, described in part.items()}

    def look_at_disk(self, needed: int) -> None:
        """Warn before the disk is full; ``needed`` are the bytes of a checkpoint."""
        if not self._ranks.is_first:
            return
        disk = shutil.disk_usage(self.path)
        self._room = needed, disk.free
        is_short = disk.free < max(_ROOM_FOR * needed, _ROOM * disk.total)
        if is_short and not self._disk_is_short:
            self._warn(
                f"{disks.left(self.path)}, and a checkpoint of this job takes {sizes.shown(needed)}; "
                f"{self._make_room}"
            )
        self._disk_is_short = is_short

    def remove(self, path: Path) -> None:
        """Take away what nobody needs; that it can't be is no reason to do without what has been written."""
        try:
            checkpoint_files.take_away(path)
        except OSError as error:
            if path not in self._stuck:
                self._warn(f"{path} is of no use any more and can't be removed ({error.strerror})")
            self._stuck.add(path)

    def put_aside(self, damaged: Iterable[str]) -> None:
        """Give damaged checkpoints names under which nobody reads them."""
        for name in damaged if self._ranks.is_first else ():
            with suppress(OSError):
                (self.path / name).rename(self.path / f"damaged-{name}")

    def everyones(self, value: Any) -> list[Any]:
        """``value`` of every rank, in order; every rank must call this together."""
        values: list[Any] = [value]
        if self._ranks.size > 1:
            values = [None] * self._ranks.size
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a failure to write on any rank into a :class:`CheckpointError` on all of them."""
        failure: str | None = None
        try:
            yield
        except OSError as error:
            failure = error.strerror or str(error)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            failure = next((str(cause) for cause in causes), str(error))
        everyones = self.everyones((failure, self._missing() if failure else ""))
        first = next((f for f, _ in everyones if f), None)
        if first:
            told = f"no checkpoint can be written to {self.path} ({first})"
            if not disks.is_told(first):
                if disks.is_denied(first) and (denied := rights.why_not(self.path)):
                    raise DiskOfCheckpointsError(f"no checkpoint can be written: {denied}")
                raise CheckpointError(f"{told}; check the folder and its rights")
            missing = next(filter(None, (missing for _, missing in everyones)), "")
            fix = f"{self._make_room}{missing}" if disks.is_full(first) else "look after that disk"
            raise DiskOfCheckpointsError(f"{told}: {disks.left(self.path)}; {fix}")

    def _missing(self) -> str:
        """What a checkpoint that was not written would have taken of the disk, and what stands in for it."""
        if self._room is None:
            return ""
        needed, free = self._room
        more = f", {sizes.shown(needed - free)} more than were free" if needed > free else ""
        there: list[Path] = []
        with suppress(OSError):
            there = checkpoint_files.newest_first(self.path.iterdir())
        newest = there[0].name if there else "its beginning"
        return (
            f". It takes {sizes.shown(needed)} beside those that stay until it is whole{more}; whoever ends "
            f"without it goes on from {newest}"
        )


def lengths_of(tensors: Tensors) -> dict[str, int]:
    """Bytes of each tensor."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
