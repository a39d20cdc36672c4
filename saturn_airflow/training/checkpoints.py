"""Checkpoints that load under any technique and number of devices.

A checkpoint is a folder ``step-00000012`` with tensors in safetensors files, written and read by torch's
distributed checkpoint (each rank its own part), and ``manifest.json`` with everything else and with the
size and SHA-256 of every file. Tensors have the names that parameters have in the job's own model:
``model.<name>`` and ``optimizer.<name>.<key>``. Nothing in it is pickled.

It is written under another name, synced to disk, and then renamed, so a folder of that name is whole, or was
damaged later; the checksums tell.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
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
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

from saturn_airflow.errors import JobError
from saturn_airflow.training.parallel import Parallel
from saturn_airflow.training.ranks import Ranks

FORMAT = 1
_FILE_BYTES = 2**30  # the tensors of one file are in memory twice while it is written
_MANIFEST = "manifest.json"
_HASH = "sha256"

Tensors = dict[str, torch.Tensor]


class CheckpointError(JobError):
    """A checkpoint that can't be written or read."""


class State:
    """Model and optimizer as a checkpoint sees them.

    :param aliases: for every name a parameter or buffer has in the whole model, the first of its names;
        tied weights have several.
    """

    def __init__(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer, aliases: Mapping[str, str]
    ) -> None:
        self._optimizer = optimizer
        persistent = set(parallel.model.state_dict(keep_vars=True))
        self._parameters = {aliases[name]: p for name, p in parallel.model.named_parameters()}
        self._buffers = {
            aliases[name]: buffer for name, buffer in parallel.model.named_buffers() if name in persistent
        }

    def model_tensors(self) -> Tensors:
        """Parameters and persistent buffers; writing into the tensors changes the model."""
        tensors = {**self._parameters, **self._buffers}
        return {f"model.{name}": _at_least_1d(tensor.detach()) for name, tensor in tensors.items()}

    def optimizer_tensors(self) -> Tensors:
        """The optimizer's state of each parameter, as far as it is tensors with dimensions."""
        return {
            f"optimizer.{name}.{key}": value
            for name, key, value in self._optimizer_entries()
            if isinstance(value, torch.Tensor) and value.ndim
        }

    def optimizer_numbers(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of each parameter, as far as it is single numbers."""
        numbers: dict[str, dict[str, Any]] = {}
        for name, key, value in self._optimizer_entries():
            if not isinstance(value, torch.Tensor):
                numbers.setdefault(name, {})[key] = value
            elif not value.ndim:
                dtype = str(value.dtype).removeprefix("torch.")
                numbers.setdefault(name, {})[key] = {"value": value.item(), "dtype": dtype}
        return numbers

    def make_optimizer_tensors(self, shapes: Mapping[str, list[int]]) -> Tensors:
        """Tensors to read the optimizer's state into, for those of ``shapes`` that belong to this rank."""
        tensors: Tensors = {}
        for full_name, shape in shapes.items():
            name = full_name.removeprefix("optimizer.").rpartition(".")[0]
            parameter = self._parameters.get(name)
            if parameter is not None:
                like_parameter = list(parameter.shape) == shape
                tensors[full_name] = (
                    torch.zeros_like(parameter.detach())
                    if like_parameter
                    else torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                )
        return tensors

    def set_optimizer(self, tensors: Tensors, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with this state of the optimizer."""
        states: dict[str, dict[str, Any]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            states.setdefault(name, {})[key] = tensor
        for name, entries in numbers.items():
            for key, value in entries.items():
                if isinstance(value, Mapping):
                    value = torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
                states.setdefault(name, {})[key] = value
        name_of = {parameter: name for name, parameter in self._parameters.items()}
        state_dict = self._optimizer.state_dict()
        for group, indices in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], indices["params"], strict=True):
                if state := states.get(name_of[parameter]):
                    state_dict["state"][index] = state
        self._optimizer.load_state_dict(state_dict)

    def _optimizer_entries(self) -> Iterator[tuple[str, str, Any]]:
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                yield name, key, value


class Checkpoints:
    """The checkpoints of one job in ``folder``.

    :param keep: how many of the newest stay.
    :param warn: called on every rank with what the user should know.
    :raises CheckpointError: when the folder can't be written.
    """

    def __init__(self, folder: Path, ranks: Ranks, keep: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._ranks = ranks
        self._keep = keep
        self._warn = warn
        with self._explained():
            if ranks.is_first:
                folder.mkdir(parents=True, exist_ok=True)
                trial = folder / f".writable-{os.getpid()}"
                trial.touch()
                trial.unlink()

    def save(self, step: int, state: State, extra: Mapping[str, Any]) -> Path:
        """Write a checkpoint; every rank must call this together.

        :param step: optimizer steps done; names the folder.
        :param extra: what else belongs to the checkpoint, JSON-ready.
        :raises CheckpointError: on every rank, when it can't be written; those before it stay.
        """
        final = self._folder / f"step-{step:08d}"
        temporary = self._folder / f".saving-step-{step:08d}"
        with self._explained():
            if self._ranks.is_first:
                for leftover in self._folder.glob(".saving-*"):
                    shutil.rmtree(leftover)
                temporary.mkdir()
        tensors = {**state.model_tensors(), **state.optimizer_tensors()}
        sizes, manifest = self._contents(tensors, state)
        with self._explained():
            writer = HuggingFaceStorageWriter(str(temporary), _file_of(sizes), save_distributed=True)
            save_distributed(tensors, storage_writer=writer)
        own_files: dict[str, Any] = {}
        with self._explained():
            paths = sorted(temporary.glob("*.safetensors"))
            own_files = {path.name: _describe(path) for path in paths[self._ranks.rank :: self._ranks.size]}
        files = {name: described for part in self._everyones(own_files) for name, described in part.items()}
        with self._explained():
            if self._ranks.is_first:
                _write_manifest(temporary, {**manifest, "step": step, "files": files, "extra": dict(extra)})
                if final.exists():
                    shutil.rmtree(final)
                temporary.rename(final)
                _sync(self._folder)
                for old in [*self._found()[self._keep :], *self._folder.glob("damaged-*")]:
                    shutil.rmtree(old)
        return final

    def load(self, state: State) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest whole checkpoint into ``state``; every rank must call this together.

        :returns: its path and what :meth:`save` got as ``extra``; None where there is no checkpoint.
        :raises CheckpointError: when the checkpoint is of another model.
        """
        found: list[Any] = self._everyones([path.name for path in self._found()])[0]
        for name in found:
            path = self._folder / name
            damages = self._everyones(self._damage(path))
            if damage := next((d for d in damages if d), None):
                self._warn(f"checkpoint {path} is damaged ({damage}); using the one before it")
                if self._ranks.is_first:
                    with suppress(OSError):
                        path.rename(self._folder / f"damaged-{name}")
                continue
            manifest = json.loads((path / _MANIFEST).read_text())
            self._read(path, state, manifest)
            extra: dict[str, Any] = manifest["extra"]
            return path, extra
        if found:
            self._warn(f"no checkpoint in {self._folder} is whole; starting from the beginning")
        return None

    def _contents(self, tensors: Tensors, state: State) -> tuple[dict[str, int], dict[str, Any]]:
        """Bytes of every tensor of all ranks, and the manifest without what is known later."""
        shapes_here = {name: list(t.shape) for name, t in tensors.items()}
        sizes_here = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        shapes: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for part in self._everyones((shapes_here, sizes_here, state.optimizer_numbers())):
            shapes.update(part[0])
            sizes.update(part[1])
            numbers.update(part[2])
        return sizes, {
            "format": FORMAT,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "optimizer_shapes": {n: shape for n, shape in shapes.items() if n.startswith("optimizer.")},
            "optimizer_numbers": numbers,
        }

    def _read(self, path: Path, state: State, manifest: Mapping[str, Any]) -> None:
        optimizer_tensors = state.make_optimizer_tensors(manifest["optimizer_shapes"])
        try:
            load_distributed(
                {**state.model_tensors(), **optimizer_tensors},
                storage_reader=HuggingFaceStorageReader(str(path)),
            )
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(
                f"checkpoint {path} does not fit the job's model ({cause}); "
                "if load_model has changed, give the job another name or remove that folder"
            ) from None
        here = {name.removeprefix("model.") for name in state.model_tensors()}
        numbers = {name: n for name, n in manifest["optimizer_numbers"].items() if name in here}
        state.set_optimizer(optimizer_tensors, numbers)

    def _found(self) -> list[Path]:
        """The checkpoints there are, newest first."""
        return sorted(self._folder.glob("step-*"), reverse=True) if self._folder.is_dir() else []

    def _damage(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, as far as this rank's part of its files shows; None if nothing."""
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
            digest = manifest.pop(_HASH)
        except (OSError, ValueError, KeyError, AttributeError):
            return f"{_MANIFEST} is missing or unreadable"
        if _digest_of(manifest) != digest:
            return f"{_MANIFEST} has changed"
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, not {FORMAT}"
        for name in sorted(manifest["files"])[self._ranks.rank :: self._ranks.size]:
            try:
                described = _describe(path / name)
            except OSError as error:
                return f"{name}: {error.strerror}"
            if described != manifest["files"][name]:
                return f"{name} has changed"
        return None

    def _everyones(self, value: Any) -> list[Any]:
        """``value`` of every rank, in order; every rank must call this together."""
        values: list[Any] = [value]
        if self._ranks.size > 1:
            values = [None] * self._ranks.size
            dist.all_gather_object(values, value)
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
            fix = (
                "free some space" if os.strerror(errno.ENOSPC) in first else "check the folder and its rights"
            )
            raise CheckpointError(f"no checkpoint can be written to {self._folder} ({first}); {fix}")


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer of ``model``, the first of its names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim or isinstance(tensor, DTensor) else tensor.view(1)


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
    digest = hashlib.new(_HASH)
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
        os.fsync(file.fileno())
        return {"bytes": file.tell(), _HASH: digest.hexdigest()}


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    path = folder / _MANIFEST
    path.write_text(json.dumps({**manifest, _HASH: _digest_of(manifest)}, indent=1))
    _sync(path)
    _sync(folder)


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.new(_HASH, json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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
    described = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is but one process
        load_distributed(dict(weights), storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}
