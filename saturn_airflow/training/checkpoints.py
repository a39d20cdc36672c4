"""Checkpoints that load under any technique and number of devices.

A checkpoint is a folder ``step-00000012`` with tensors in safetensors files, written and read by torch's
distributed checkpoint (each rank its own part), and ``manifest.json`` with everything else and with the
size and SHA-256 of every file. Tensors have the names that parameters have in the job's own model:
``model.<name>`` and ``optimizer.<name>.<key>``. Nothing in it is pickled.

It belongs to a definition of the job, which stands in its manifest; beside it stand the versions of the
packages that wrote it, which nothing depends on. A checkpoint of another definition, or in a format that a
newer version of this package wrote, is refused and left as it is.

It is written under another name, synced to disk, and then renamed, so a folder of that name is whole, or was
damaged later; the checksums tell.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from saturn_airflow.launch import checkpoint_files
from saturn_airflow.launch.checkpoint_files import HASH, MANIFEST
from saturn_airflow.model import formats, sizes
from saturn_airflow.model.definition import Change, Definition
from saturn_airflow.model.errors import JobError
from saturn_airflow.training import storing
from saturn_airflow.training.beside_tensors import About, of_all
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.state import State, Tensors

_FORMAT = "a checkpoint"
_FILE_BYTES = 2**30  # the tensors of one file are in memory twice while it is written
#: How many more checkpoints, and how much of a disk, should still find room before the user is warned.
_ROOM_FOR, _ROOM = 3, 0.03
_MAKE_ROOM = (
    "free some space (keep_checkpoints=1, [saturn] checkpoints_budget and keep_sweeps_days take less)"
)


class CheckpointError(JobError):
    """A checkpoint that can't be written or read."""


class Checkpoints:
    """The checkpoints of one job in ``folder``.

    :param keep: how many of the newest stay.
    :param warn: called on every rank with what the user should know.
    :param definition: what they belong to; None where nobody asks.
    :param goes_on_from: the hash of another definition whose checkpoints are taken all the same.
    :param beside: write while training goes on, from a copy on the host; None for where it pays, on GPUs.
    :raises CheckpointError: when the folder can't be written.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        keep: int,
        warn: Callable[[str], None],
        beside: bool | None = None,
        *,
        definition: Definition | None = None,
        goes_on_from: str | None = None,
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._keep = keep
        self._warn = warn
        self._definition = definition
        self._goes_on_from = goes_on_from
        #: How the definition has changed since the checkpoint was written that :meth:`load` has read.
        self.changes: list[Change] = []
        #: What the last checkpoint lacks, and why, by its name.
        self.forgotten: dict[str, str] = {}
        self._beside = ranks.device.type == "cuda" if beside is None else beside
        # What is said while training goes on must not get between what training says.
        self._group = dist.new_group(backend="gloo") if self._beside and ranks.size > 1 else None
        #: How long training should go on before the next: checkpoints that keep it waiting for seconds take a
        #: twentieth of its time at most.
        self.rest_seconds = 0.0
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._disk_is_short = False
        with self._explained():
            if ranks.is_first:
                folder.mkdir(parents=True, exist_ok=True)
                trial = folder / f".writable-{os.getpid()}"
                trial.touch()
                trial.unlink()

    def save(
        self,
        step: int,
        state: State,
        extra: Mapping[str, Any],
        saved: Callable[[Path, float], None] | None = None,
        sure: int | None = None,
    ) -> None:
        """Write a checkpoint; every rank must call this together.

        When the one before this is still being written, this waits for it.

        :param step: optimizer steps done; names the folder.
        :param extra: what else belongs to the checkpoint, JSON-ready.
        :param saved: called with the checkpoint's path and the seconds it took, once it is whole.
        :param sure: the newest checkpoint of no more steps than these stays, too.
        :raises CheckpointError: on every rank, when it can't be written; those before it stay. What goes
            wrong while training goes on is told by the next call of this or :meth:`finish`.
        """
        asked = time.perf_counter()
        try:
            self.finish()
        except CheckpointError as error:
            self._warn(f"{error}; training goes on")
        began = time.perf_counter()
        tensors = storing.apart({**state.model_tensors(), **state.optimizer_tensors()})
        about = About.of(state)
        extra = copy.deepcopy(dict(extra))
        # What lies in the host's memory already, as with spill and offload, would be there twice.
        beside = self._beside and not (self._ranks.device.type == "cuda" and _mostly_on_host(tensors))
        if beside:
            tensors = BlockingAsyncStager().stage(tensors)

        def write() -> None:
            path = self._write(step, tensors, about, extra, step if sure is None else sure)
            if saved is not None:
                saved(path, time.perf_counter() - began)

        def write_and_keep_error() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        if not beside:
            write()
        waited = time.perf_counter() - asked
        self.rest_seconds = 19 * waited if waited > 2 else 0.0
        if not beside:
            return
        self._writer = threading.Thread(target=write_and_keep_error, name="saturn-checkpoint", daemon=True)
        self._writer.start()

    def finish(self) -> None:
        """Wait until nothing is being written any more; every rank must call this together.

        :raises CheckpointError: on every rank, when what was being written could not be.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, tensors: Tensors, about: About, extra: Mapping[str, Any], sure: int) -> Path:
        temporary = self._folder / f".saving-step-{step:08d}"
        try:
            return self._write_to(temporary, step, tensors, about, extra, sure)
        except CheckpointError:
            # What a full disk took of it is of use to nobody else.
            if self._ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _write_to(
        self,
        temporary: Path,
        step: int,
        tensors: Tensors,
        about: About,
        extra: Mapping[str, Any],
        sure: int,
    ) -> Path:
        final = self._folder / f"step-{step:08d}"
        with self._explained():
            if self._ranks.is_first:
                for leftover in self._folder.glob(".saving-*"):
                    shutil.rmtree(leftover)
                temporary.mkdir()
        lengths, manifest = self._contents(tensors, about)
        self._look_at_disk(sum(lengths.values()))
        with self._explained():
            writer = HuggingFaceStorageWriter(str(temporary), _file_of(lengths), save_distributed=True)
            save_distributed(tensors, storage_writer=writer, process_group=self._group)
        own_files: dict[str, Any] = {}
        with self._explained():
            paths = sorted(temporary.glob("*.safetensors"))
            own_files = {path.name: _describe(path) for path in paths[self._ranks.rank :: self._ranks.size]}
        files = {name: described for part in self._everyones(own_files) for name, described in part.items()}
        with self._explained():
            if self._ranks.is_first:
                _write_manifest(temporary, {**manifest, "step": step, "files": files, "extra": extra})
                if final.exists():
                    shutil.rmtree(final)
                temporary.rename(final)
                _sync(self._folder)
                self._remove_old(sure)
        return final

    def _look_at_disk(self, needed: int) -> None:
        """Warn before the disk is full; ``needed`` are the bytes of a checkpoint."""
        if not self._ranks.is_first:
            return
        disk = shutil.disk_usage(self._folder)
        is_short = disk.free < max(_ROOM_FOR * needed, _ROOM * disk.total)
        if is_short and not self._disk_is_short:
            self._warn(
                f"the disk at {_disk_of(self._folder)} has {sizes.shown(disk.free)} left, and a checkpoint "
                f"of this job takes {sizes.shown(needed)}; {_MAKE_ROOM}"
            )
        self._disk_is_short = is_short

    def _remove_old(self, sure: int) -> None:
        found = self._found()
        kept = {*found[: self._keep], *[path for path in found if _step_of(path) <= sure][:1]}
        useless = (*self._folder.glob("damaged-*"), *self._folder.glob("refused-*"))
        for old in [*(path for path in found if path not in kept), *useless]:
            shutil.rmtree(old)

    def set_aside(self, after: int) -> None:
        """Take those of more than ``after`` steps out of what :meth:`load` finds; they stay until the next is
        written. Every rank must call this together."""
        with suppress(CheckpointError):
            self.finish()
        with self._explained():
            for path in self._found() if self._ranks.is_first else []:
                if _step_of(path) > after:
                    aside = self._folder / f"refused-{path.name}"
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)

    def load(self, state: State) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest whole checkpoint into ``state``; every rank must call this together.

        :returns: its path and what :meth:`save` got as ``extra``; None where there is no checkpoint.
        :raises CheckpointError: when the checkpoint is of another model or definition.
        :raises NewerFormatError: when the newest is in a format that this version can't read.
        """
        found: list[Any] = self._everyones([path.name for path in self._found()])[0]
        for name in found:
            path = self._folder / name
            formats.check(checkpoint_files.manifest_of(path), _FORMAT, path)
            damages = self._everyones(
                checkpoint_files.damage(path, slice(self._ranks.rank, None, self._ranks.size))
            )
            if damage := next((d for d in damages if d), None):
                self._warn(f"checkpoint {path} is damaged ({damage}); using the one before it")
                if self._ranks.is_first:
                    with suppress(OSError):
                        path.rename(self._folder / f"damaged-{name}")
                continue
            manifest = json.loads((path / MANIFEST).read_text())
            self._check_definition(path, manifest)
            self._read(path, state, manifest)
            extra: dict[str, Any] = manifest["extra"]
            return path, extra
        if found:
            self._warn(f"no checkpoint in {self._folder} is whole; starting from the beginning")
        elif why := checkpoint_files.why_removed(self._folder):
            self._warn(f"the checkpoints in {self._folder} are gone ({why}); starting from the beginning")
        return None

    def _check_definition(self, path: Path, manifest: Mapping[str, Any]) -> None:
        if self._definition is None or "definition" not in manifest:
            return
        before = Definition.from_dict(manifest["definition"])
        self.changes = before.changes(self._definition)
        if self.changes and before.hash != self._goes_on_from:
            found = "; ".join(map(str, self.changes))
            raise CheckpointError(
                f"checkpoint {path} is of another definition of the job ({found}); train it in another "
                "folder, or say that it is to go on all the same"
            )

    def _contents(self, tensors: Tensors, about: About) -> tuple[dict[str, int], dict[str, Any]]:
        """Bytes of every tensor of all ranks, and the manifest without what is known later."""
        shapes_here = {name: list(t.shape) for name, t in tensors.items()}
        sizes_here = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        shapes: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        everyones = self._everyones((shapes_here, sizes_here, about))
        for shapes_there, sizes_there, _ in everyones:
            shapes.update(shapes_there)
            sizes.update(sizes_there)
        abouts = [about for *_, about in everyones]
        self.forgotten = {name: why for about in abouts for name, why in about.forgotten.items()}
        described = {} if self._definition is None else {"definition": self._definition.to_dict()}
        return sizes, {
            **formats.stamp(_FORMAT),
            **of_all(abouts),
            **described,
            "provenance": {"saturn_airflow": formats.version(), "torch": torch.__version__},
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "optimizer_shapes": {n: shape for n, shape in shapes.items() if n.startswith("optimizer.")},
        }

    def _read(self, path: Path, state: State, manifest: Mapping[str, Any]) -> None:
        dtypes = manifest.get("dtypes", {})
        optimizer_tensors = state.make_optimizer_tensors(manifest["optimizer_shapes"], dtypes)
        model_tensors = state.model_tensors()
        try:
            load_distributed(
                {**model_tensors, **optimizer_tensors},
                storage_reader=HuggingFaceStorageReader(str(path)),
            )
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(
                f"checkpoint {path} does not fit the job's model ({cause}); "
                "if load_model has changed, give the job another name or remove that folder"
            ) from None
        state.set_model(model_tensors)
        here = {name.removeprefix("model.") for name in model_tensors}
        numbers = {name: n for name, n in manifest["optimizer_numbers"].items() if name in here}
        # Before the state of groups was kept there was none of it in the manifest.
        state.set_optimizer(optimizer_tensors, numbers, dtypes, manifest.get("optimizer_common", {}))
        if groups := manifest.get("optimizer_groups"):
            state.groups.set(groups)
        state.own.set(manifest.get("optimizer_attributes", {}))
        state.attributes.set(manifest.get("model_attributes", {}))
        if state.globals is not None:
            state.globals.set(manifest.get("job_globals", {}))
        self.forgotten = manifest.get("forgotten", {})

    def _found(self) -> list[Path]:
        """The checkpoints there are, newest first."""
        return sorted(self._folder.glob("step-*"), reverse=True) if self._folder.is_dir() else []

    def _everyones(self, value: Any) -> list[Any]:
        """``value`` of every rank, in order; every rank must call this together."""
        values: list[Any] = [value]
        if self._ranks.size > 1:
            values = [None] * self._ranks.size
            dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a failure to write on any rank into a :class:`CheckpointError` on all of them."""
        failure: str | None = None
        try:
            yield
        except OSError as error:
            failure = error.strerror or str(error)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            failure = next((str(cause) for cause in causes), str(error))
        first = next((f for f in self._everyones(failure) if f), None)
        if first:
            is_full = any(os.strerror(number) in first for number in (errno.ENOSPC, errno.EDQUOT))
            fix = (
                f"{_MAKE_ROOM} at {_disk_of(self._folder)}" if is_full else "check the folder and its rights"
            )
            raise CheckpointError(f"no checkpoint can be written to {self._folder} ({first}); {fix}")


def _mostly_on_host(tensors: Tensors) -> bool:
    sizes = {"cpu": 0, "cuda": 0}
    for tensor in tensors.values():
        sizes["cpu" if tensor.device.type == "cpu" else "cuda"] += tensor.numel() * tensor.element_size()
    return sizes["cpu"] > sizes["cuda"]


def _file_of(sizes: Mapping[str, int]) -> dict[str, int]:
    """The number of the file, from 1, that each tensor is written to: files of bounded size."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def _describe(path: Path) -> dict[str, Any]:
    """Size and digest of a file, which is on the disk afterwards."""
    described = checkpoint_files.describe(path)
    _sync(path)
    return described


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**manifest, HASH: checkpoint_files.digest_of(manifest)}))
    _sync(path)
    _sync(folder)


def _disk_of(folder: Path) -> Path:
    """Where the file system of ``folder`` is mounted."""
    return next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_mount())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_weights(path: str | Path) -> Tensors:
    """The weights in a checkpoint, whole and on the CPU, by the names they have in the job's model.

    Tied weights are there once, under the first of their names: load them with
    ``model.load_state_dict(weights, strict=False)``.
    """
    reader = HuggingFaceStorageReader(str(path))
    dtypes = json.loads((Path(path) / MANIFEST).read_text()).get("dtypes", {})
    described = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is but one process
        load_distributed(dict(weights), storage_reader=reader, no_dist=True)
    return {
        name.removeprefix("model."): storing.original(
            tensor, getattr(torch, dtypes[name]) if name in dtypes else tensor.dtype
        )
        for name, tensor in weights.items()
    }
