"""Checkpoints that load under any technique and number of devices.

A checkpoint is a folder ``step-00000012`` with tensors in safetensors files, written and read by torch's
distributed checkpoint (each rank its own part), and ``manifest.json`` with everything else and with the
size and SHA-256 of every file. Tensors have the names that parameters have in the job's own model:
``model.<name>`` and ``optimizer.<name>.<key>``. Nothing in it is pickled. What training leaves of
the model as it was lies in a folder beside the checkpoints (``frozen.py``), which each names with its digest.

It belongs to a definition of the job, which stands in its manifest; beside it stand the versions of the
packages that wrote it, which nothing depends on. A checkpoint of another definition, or in a format that a
newer version of this package wrote, is refused and left as it is.

It is written under another name, synced to disk, and then renamed, so a folder of that name is whole, or was
damaged later; the checksums tell.
"""

from __future__ import annotations

import copy
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from saturn_airflow.launch import checkpoint_files
from saturn_airflow.launch.checkpoint_files import MANIFEST
from saturn_airflow.model import disks, formats, json_text
from saturn_airflow.model.definition import Change, Definition
from saturn_airflow.training import storing, tensor_files
from saturn_airflow.training.beside_tensors import StateBesideTensors, of_all
from saturn_airflow.training.frozen import FrozenFolder, UnchangedTensors, worth_a_folder
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.shared_folder import CheckpointError as CheckpointError
from saturn_airflow.training.shared_folder import DiskOfCheckpointsError, SharedFolder, lengths_of
from saturn_airflow.training.staging import Staging, lie_on_device, own_part
from saturn_airflow.training.state import State, Tensors

_FORMAT = "a checkpoint"
# The format of one that needs a folder of what training left alone: older versions must not read it.
_FORMAT_WITH_BASE = 3


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
        self._unchanged = UnchangedTensors()
        self._base: FrozenFolder | None = None
        self._beside = ranks.device.type == "cuda" if beside is None else beside
        # What is said while training goes on must not get between what training says.
        self._group = dist.new_group(backend="gloo") if self._beside and ranks.size > 1 else None
        #: How long training should go on before the next: checkpoints that keep it waiting for seconds, and
        #: copies on a GPU, take a twentieth of its time at most.
        self.rest_seconds = 0.0
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging = Staging(ranks.device)
        self._changes_come_late = True
        self._shared = SharedFolder(folder, ranks, self._group, warn, keep)

    def save(
        self,
        step: int,
        state: State,
        extra: Mapping[str, Any],
        saved: Callable[[Path, float], None] | None = None,
        sure: int | None = None,
        *,
        awaited: bool = False,
    ) -> None:
        """Write a checkpoint; every rank must call this together.

        When the one before this is still being written, this waits for it.

        :param step: optimizer steps done; names the folder.
        :param extra: what else belongs to the checkpoint, JSON-ready.
        :param saved: called with the checkpoint's path and the seconds it took, once it is whole.
        :param sure: the newest checkpoint of no more steps than these stays, too.
        :param awaited: whether :meth:`before_changes` is called before the optimizer's next step, and nothing
            else is to change what the checkpoint has of what is trained. Other changes are noticed: no
            checkpoint is written then, and later ones are copied before anything goes on.
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
        frozen = self._frozen(tensors)
        if self._base is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in frozen}
        about = StateBesideTensors.of(state)
        extra = copy.deepcopy(dict(extra))
        beside = self._beside
        if beside and self._ranks.device.type == "cuda":
            beside = not self._ranks.any(not lie_on_device(tensors))
        if beside:
            own = own_part(tensors, self._ranks.rank, self._shared.everyones)
            late = own.keys() - state.untrained() if awaited and self._changes_come_late else ()
            tensors = self._staging.copies(own, late)

        def write() -> None:
            if beside:
                self._staging.wait()
                self.rest_seconds = 19 * (time.perf_counter() - asked)
                self._check_copies()
            path = self._write(step, tensors, frozen, about, extra, step if sure is None else sure)
            if saved is not None:
                saved(path, time.perf_counter() - began)

        if not beside:
            write()
        waited = time.perf_counter() - asked
        self.rest_seconds = 19 * waited if waited > 2 else 0.0
        if beside:
            self._begin_writing(write)

    def _begin_writing(self, write: Callable[[], None]) -> None:
        """Write in a thread of its own; :meth:`finish` tells what goes wrong."""

        def write_and_keep_error() -> None:
            if self._ranks.device.type == "cuda":  # threads begin on the first GPU, which may be another's
                torch.cuda.set_device(self._ranks.device)
            try:
                write()
            except BaseException as error:
                self._error = error

        self._writer = threading.Thread(target=write_and_keep_error, name="saturn-checkpoint", daemon=True)
        self._writer.start()

    def before_changes(self) -> None:
        """Before what a checkpoint has is changed: have the device wait for the copies, not the host."""
        self._staging.before_changes()

    def _check_copies(self) -> None:
        everyones = self._shared.everyones(self._staging.changed())
        if changed := next((name for name in everyones if name is not None), None):
            self._changes_come_late = False
            raise CheckpointError(
                f"no checkpoint was written: {changed!r} was changed while it was copied, and not by the "
                "optimizer's step; from the next on training waits for the copies"
            )

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

    def _frozen(self, tensors: Tensors) -> frozenset[str]:
        """The names of what lies, or is to lie, in the folder beside the checkpoints."""
        changed = self._unchanged.changed(tensors)
        there = self._base is not None and (self._folder / self._base.folder / MANIFEST).is_file()
        told = self._shared.everyones((self._unchanged.names(), changed, lengths_of(tensors), there))
        gone = set().union(*(changed for _, changed, *_ in told))
        self._unchanged.forget(gone)
        unchanged = set().union(*(names for names, *_ in told)) - gone
        if not told[0][-1]:
            self._base = None  # it was taken away, and is written anew
            lengths = {name: length for *_, part, _ in told for name, length in part.items()}
            return frozenset(unchanged if worth_a_folder(unchanged, lengths) else ())
        assert self._base is not None
        return self._base.names & unchanged

    def _write(
        self,
        step: int,
        tensors: Tensors,
        frozen: frozenset[str],
        about: StateBesideTensors,
        extra: Mapping[str, Any],
        sure: int,
    ) -> Path:
        temporary = self._folder / f".saving-step-{step:08d}"
        try:
            with self._shared.explained():
                for leftover in self._folder.glob(".saving-*") if self._ranks.is_first else ():
                    checkpoint_files.take_away(leftover)
            if frozen and self._base is None:
                own = {name: tensor for name, tensor in tensors.items() if name in frozen}
                tensors = {name: tensor for name, tensor in tensors.items() if name not in frozen}
                self._base = self._write_base(own, frozen)
            base = self._base._replace(names=frozen) if self._base is not None and frozen else None
            return self._write_to(temporary, step, tensors, base, about, extra, sure)
        except CheckpointError:
            # What a full disk took of it is of use to nobody else.
            for leftover in self._folder.glob(".saving-*") if self._ranks.is_first else ():
                shutil.rmtree(leftover, ignore_errors=True)
            raise

    def _write_base(self, tensors: Tensors, names: frozenset[str]) -> FrozenFolder:
        """Write what training leaves alone to a folder of its own."""
        temporary = self._folder / ".saving-frozen"
        files, digest = self._shared.write(temporary, tensors), ""
        with self._shared.explained():
            if self._ranks.is_first:
                digest = tensor_files.write_manifest(temporary, {"files": files})
                final = self._folder / f"{checkpoint_files.FROZEN}{digest[:16]}"
                checkpoint_files.take_away(final)
                temporary.rename(final)
                tensor_files.sync(self._folder)
        digest = self._shared.everyones(digest)[0]
        return FrozenFolder(f"{checkpoint_files.FROZEN}{digest[:16]}", digest, names)

    def _write_to(
        self,
        temporary: Path,
        step: int,
        tensors: Tensors,
        base: FrozenFolder | None,
        about: StateBesideTensors,
        extra: Mapping[str, Any],
        sure: int,
    ) -> Path:
        final = self._folder / f"step-{step:08d}"
        files = self._shared.write(temporary, tensors)
        manifest = {**self._manifest(tensors, about), "step": step, "files": files, "extra": extra}
        if base is not None:
            manifest |= {formats.FORMAT: _FORMAT_WITH_BASE, "frozen": base.to_manifest()}
        with self._shared.explained():
            if self._ranks.is_first:
                tensor_files.write_manifest(temporary, manifest)
                # Nobody trains the steps again that it has: their losses must be known.
                self._ranks.wait_until_recorded()
                checkpoint_files.take_away(final)
                temporary.rename(final)
                tensor_files.sync(self._folder)
                self._remove_old(sure)
        return final

    def _remove_old(self, sure: int) -> None:
        found = self._found()
        kept = {*found[: self._keep], *[path for path in found if checkpoint_files.step_of(path) <= sure][:1]}
        useless = (*self._folder.glob("damaged-*"), *self._folder.glob("refused-*"))
        for old in [*(path for path in found if path not in kept), *useless]:
            self._shared.remove(old)
        for base in checkpoint_files.unused(self._folder):
            self._shared.remove(base)

    def set_aside(self, after: int) -> None:
        """Take those of more than ``after`` steps out of what :meth:`load` finds; they stay until the next is
        written. Every rank must call this together."""
        with suppress(CheckpointError):
            self.finish()
        with self._shared.explained():
            for path in self._found() if self._ranks.is_first else []:
                if checkpoint_files.step_of(path) > after:
                    aside = self._folder / f"refused-{path.name}"
                    checkpoint_files.take_away(aside)
                    path.rename(aside)

    def load(self, state: State) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest whole checkpoint into ``state``; every rank must call this together.

        :returns: its path and what :meth:`save` got as ``extra``; None where there is no checkpoint.
        :raises CheckpointError: when the checkpoint is of another model or definition, or what training left
            alone has been taken away or changed: nothing is lost where it can be put back.
        :raises NewerFormatError: when the newest is in a format that this version can't read.
        """
        found = self._load(state)
        names = state.untrained() if self._base is None else self._base.names
        self._unchanged.remember(state.model_tensors() if names else {}, names)
        return found

    def _load(self, state: State) -> tuple[Path, dict[str, Any]] | None:
        there: list[str] = []
        with self._shared.explained():
            there = [path.name for path in self._found()]
        found: list[Any] = self._shared.everyones(there)[0]
        aside: list[str] = []
        failed = ""
        for name in found:
            path = self._folder / name
            formats.check(checkpoint_files.manifest_of(path), _FORMAT, path)
            part = slice(self._ranks.rank, None, self._ranks.size)  # what this rank reads for all
            damages = self._shared.everyones(checkpoint_files.damage(path, part))
            if damage := next((d for d in damages if d), None):
                if checkpoint_files.is_withheld(damage):
                    raise CheckpointError(
                        f"checkpoint {path} can't be read ({damage}), and may be whole: let the user that "
                        "trains read it; or move it away, and the job goes on from what is left"
                    )
                self._warn(f"checkpoint {path} is damaged ({damage}); using the one before it")
                failed = failed or (f"{path}: {damage}" if disks.is_told(damage) else "")
                aside.append(name)
                continue
            self._shared.put_aside(aside)
            manifest = json_text.parse((path / MANIFEST).read_text())
            self._check_definition(path, manifest)
            of_base = self._shared.everyones(checkpoint_files.damage_of_base(path, part))
            if damage := next((d for d in of_base if d), None):
                raise _without_base(path, damage)
            self._base = FrozenFolder.from_manifest(manifest)
            self._read(path, state, manifest)
            extra: dict[str, Any] = manifest["extra"]
            return path, extra
        if failed:
            raise DiskOfCheckpointsError(
                f"no checkpoint in {self._folder} can be read ({failed}): look after that disk; where they "
                "are lost, move them away, and the job starts from the beginning"
            )
        self._shared.put_aside(aside)
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
        if other := [change for change in self.changes if change.field == "hparams.optimizer"]:
            raise CheckpointError(
                f"checkpoint {path} holds the state of another optimizer ({other[0]}), which can't go on "
                "with it; start the job from scratch"
            )

    def _manifest(self, tensors: Tensors, about: StateBesideTensors) -> dict[str, Any]:
        """The manifest without what is known later."""
        shapes: dict[str, list[int]] = {}
        everyones = self._shared.everyones(({name: list(t.shape) for name, t in tensors.items()}, about))
        for shapes_there, _ in everyones:
            shapes.update(shapes_there)
        abouts = [about for _, about in everyones]
        self.forgotten = {name: why for about in abouts for name, why in about.forgotten.items()}
        described = {} if self._definition is None else {"definition": self._definition.to_dict()}
        return {
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
        state.change_buffers(manifest.get("late_buffers", {}), dtypes, manifest.get("model_attributes", {}))
        state.make_room(tensor_files.shapes(path))
        model_tensors = state.model_tensors()
        base = self._base
        beside = {n: t for n, t in model_tensors.items() if base is not None and n in base.names}
        own = {n: t for n, t in {**model_tensors, **optimizer_tensors}.items() if n not in beside}
        try:
            tensor_files.read_into(path, own)
            if base is not None:
                tensor_files.read_into(path.parent / base.folder, beside)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(
                f"checkpoint {path} does not fit the job's model ({cause}); "
                "if load_model has changed, give the job another name or remove that folder"
            ) from None
        state.set_model(model_tensors)
        numbers = {n: v for n, v in manifest["optimizer_numbers"].items() if f"model.{n}" in model_tensors}
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
        """The checkpoints there are, newest first.

        :raises OSError: when that can't be told.
        """
        with suppress(FileNotFoundError):
            return checkpoint_files.newest_first(map(self._folder.joinpath, os.listdir(self._folder)))
        return []


def _without_base(path: Path, damage: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is whole, but what training left of the model as it was is not: in "
        f"{checkpoint_files.base_of(path)}, {damage}. Put that folder back, or train the job from scratch"
    )


def read_weights(path: str | Path) -> Tensors:
    """The weights in a checkpoint, whole and on the CPU, by the names they have in the job's model.

    Tied weights are there once, under the first of their names: load them with
    ``model.load_state_dict(weights, strict=False)``. What training left as it was is read from the folder
    ``frozen-...`` beside the checkpoint.

    :raises CheckpointError: when that folder is missing, or is not what it was.
    """
    manifest = checkpoint_files.manifest_of(Path(path))
    dtypes, base = manifest.get("dtypes", {}), FrozenFolder.from_manifest(manifest)
    weights = tensor_files.read_whole(Path(path), "model.")
    if base is not None:
        if damage := checkpoint_files.damage_of_base(Path(path)):
            raise _without_base(Path(path), damage)
        beside = tensor_files.read_whole(Path(path).parent / base.folder, "model.")
        weights |= {name: tensor for name, tensor in beside.items() if name in base.names}
    return {
        name.removeprefix("model."): storing.original(
            tensor, getattr(torch, dtypes[name]) if name in dtypes else tensor.dtype
        )
        for name, tensor in weights.items()
    }
