"""Checkpoints: whole or recognised as damaged, never pickled, and never lost to a failed save."""

# Models without types.
# mypy: disable-error-code="index, misc, no-any-return, no-untyped-call, operator, union-attr"

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saving import Folder, Training, equal, lay
from worst_order import WorstOrder

from saturn_airflow.launch import checkpoint_files
from saturn_airflow.model.errors import DiskError
from saturn_airflow.training import tensor_files
from saturn_airflow.training.checkpoints import CheckpointError, Checkpoints, read_weights
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.staging import Staging


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield Ranks(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> dict[str, bytes]:
    """The files of a folder with checkpoints of steps 1 and 2."""
    folder = Folder(tmp_path_factory.mktemp("two"), ranks)
    for step in (1, 2):
        folder.save(step, Training(ranks, step).state, {"step": step})
    return {
        str(path.relative_to(folder.path)): path.read_bytes()
        for path in folder.path.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("optimizer", ["torch.optim:AdamW", "torch.optim:SGD", "torch.optim:Adagrad"])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, ranks: Ranks, optimizer: str) -> None:
    folder = Folder(tmp_path, ranks)
    saved, loaded = Training(ranks, 3, optimizer=optimizer), Training(ranks, 0, optimizer=optimizer)
    assert folder.checkpoints.load(loaded.state) is None
    path = folder.save(3, saved.state, {"note": [1, None]})
    assert folder.checkpoints.load(loaded.state) == (path, {"note": [1, None]})
    assert equal(saved.contents(), loaded.contents())
    assert folder.warnings == []
    weights = read_weights(path)
    assert set(weights) == {"embed.weight", "scale", "frozen", "seen"}
    assert torch.equal(weights["embed.weight"], saved.model.head.weight)


def test_nothing_is_pickled(two: dict[str, bytes]) -> None:
    assert {Path(name).suffix for name in two} == {".safetensors", ".json"}
    for name, content in two.items():
        if name.endswith(".json"):
            json.loads(content)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_noticed(
    two: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, ranks: Ranks, data: st.DataObject
) -> None:
    newest = sorted(name for name in two if name.startswith("step-00000002"))
    name = data.draw(st.sampled_from(newest))
    position = data.draw(st.integers(0, len(two[name]) - 1))
    broken = bytearray(two[name])
    broken[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flipped")
    lay({**two, name: bytes(broken)}, path)
    check_falls_back(path, ranks)


@pytest.mark.parametrize("how", ["truncated", "no tensors", "no manifest", "empty", "only a folder"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    two: dict[str, bytes], tmp_path: Path, ranks: Ranks, how: str
) -> None:
    files = dict(two)
    tensors = next(name for name in two if name.startswith("step-00000002") and name.endswith("safetensors"))
    if how == "truncated":
        files[tensors] = files[tensors][:-1]
    elif how == "no tensors":
        del files[tensors]
    elif how == "no manifest":
        del files["step-00000002/manifest.json"]
    elif how == "empty":
        files[tensors] = b""
    else:
        files = {name: content for name, content in files.items() if name.startswith("step-00000001")}
        (tmp_path / "step-00000002").mkdir()
    lay(files, tmp_path)
    check_falls_back(tmp_path, ranks)


def check_falls_back(path: Path, ranks: Ranks) -> None:
    folder = Folder(path, ranks)
    loaded = Training(ranks, 0)
    found = folder.checkpoints.load(loaded.state)
    assert found == (path / "step-00000001", {"step": 1})
    assert equal(Training(ranks, 1).contents(), loaded.contents())
    (warning,) = folder.warnings
    assert f"checkpoint {path / 'step-00000002'} is damaged" in warning
    assert "using the one before it" in warning
    # It is not tried again, and it makes way once there is a newer one.
    assert sorted(p.name for p in path.iterdir()) == ["damaged-step-00000002", "step-00000001"]
    folder.save(2, loaded.state, {})
    assert sorted(p.name for p in path.iterdir()) == ["step-00000001", "step-00000002"]


def test_starts_over_when_nothing_is_whole(two: dict[str, bytes], tmp_path: Path, ranks: Ranks) -> None:
    lay({name: content[:-1] for name, content in two.items()}, tmp_path)
    folder = Folder(tmp_path, ranks)
    training = Training(ranks, 0)
    before = {name: value.clone() for name, value in training.contents().items()}
    assert folder.checkpoints.load(training.state) is None
    assert len(folder.warnings) == 3
    assert folder.warnings[-1] == f"no checkpoint in {tmp_path} is whole; starting from the beginning"
    assert equal(before, training.contents())


def test_the_newest_stay_and_leftovers_go(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / ".saving-step-00000001").mkdir()
    (tmp_path / ".saving-step-00000001" / "half").touch()
    folder = Folder(tmp_path, ranks, keep=3)
    training = Training(ranks, 1)
    for step in range(1, 13):
        folder.save(step, training.state, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000011", "step-00000012"]


def test_another_model_is_told(two: dict[str, bytes], tmp_path: Path, ranks: Ranks) -> None:
    lay(two, tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit the job's model .* give the job another name"):
        Folder(tmp_path, ranks).checkpoints.load(Training(ranks, 0, width=4).state)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be written to .*/file/checkpoints .*check the folder"
    ):
        Folder(tmp_path / "file" / "checkpoints", ranks)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("fails", ["write", "manifest", "rename"])
def test_a_failed_save_leaves_the_one_before(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, fails: str, beside: bool
) -> None:
    folder = Folder(tmp_path, ranks, beside=beside)
    training = Training(ranks, 1)
    folder.save(1, training.state, {"step": 1})

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        if fails == "write":
            patched.setattr("torch.distributed.checkpoint.filesystem.os.fsync", full)
        elif fails == "manifest":
            patched.setattr(tensor_files, "write_manifest", full)
        else:
            patched.setattr(Path, "rename", full)
        with pytest.raises(CheckpointError, match=r"No space left.*; free some space"):
            folder.save(2, training.state, {"step": 2})
    found = folder.checkpoints.load(training.state)
    assert found == (tmp_path / "step-00000001", {"step": 1})
    assert folder.save(2, training.state, {"step": 2}).is_dir()


def test_tensors_are_spread_over_files_of_bounded_size(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_FILE_BYTES", 64)
    folder = Folder(tmp_path, ranks)
    saved, loaded = Training(ranks, 2), Training(ranks, 0)
    path = folder.save(2, saved.state, {})
    assert len(list(path.glob("*.safetensors"))) > 2
    folder.checkpoints.load(loaded.state)
    assert equal(saved.contents(), loaded.contents())


def test_what_is_saved_beside_training_is_what_was_there_then(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, ranks, beside=True)
    training = Training(ranks, 2)
    then = {name: value.clone() for name, value in training.contents().items()}
    go_on = threading.Event()
    write = tensor_files.write_manifest

    def slowly(*args: Any) -> None:
        assert go_on.wait(10)
        write(*args)

    monkeypatch.setattr(tensor_files, "write_manifest", slowly)
    extra = {"step": 2, "list": [1]}
    folder.checkpoints.save(2, training.state, extra)
    extra["list"].append(2)  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.model(torch.arange(5)).backward()
    training.optimizer.step()
    go_on.set()
    folder.checkpoints.finish()
    loaded = Training(ranks, 0)
    assert folder.checkpoints.load(loaded.state) == (tmp_path / "step-00000002", {"step": 2, "list": [1]})
    assert equal(loaded.contents(), then)


def test_what_lies_in_the_hosts_memory_is_not_copied_there(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with spill and offload, where a second copy of the model may be more than the host has."""
    on_a_gpu = dataclasses.replace(ranks, device=torch.device("cuda", 0))
    saved, loaded = Training(ranks, 2), Training(ranks, 0)

    def stage(*args: Any) -> None:
        raise AssertionError("it was copied")

    monkeypatch.setattr(Staging, "copies", stage)
    saving = Checkpoints(tmp_path, on_a_gpu, 2, print)
    saving.save(2, saved.state, {})
    assert saving._writer is None
    saving.load(loaded.state)
    assert equal(saved.contents(), loaded.contents())


def test_what_was_changed_while_it_was_copied_is_told_and_not_written(tmp_path: Path, ranks: Ranks) -> None:
    """As by a forward pass that clips weights in place: the optimizer is not who changes them."""
    training = Training(ranks, 1)
    saving = Checkpoints(tmp_path, ranks, 2, print, beside=True)
    saving._staging = Staging(ranks.device, WorstOrder(lambda line: True))
    torch.set_grad_enabled(False)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(threading.Thread, "start", lambda thread: None)  # it gets to it late
            saving.save(1, training.state, {}, awaited=True)
        training.model.embed.weight.data.mul_(0.5)
        saving._writer.run()
    finally:
        torch.set_grad_enabled(True)
    saving._writer = None
    with pytest.raises(CheckpointError, match=r"'model.embed.weight' was changed while it was copied"):
        saving.finish()
    assert not list(tmp_path.glob("step-*"))
    saving.save(1, training.state, {}, awaited=True)
    then = training.contents()
    then = {name: tensor.clone() for name, tensor in then.items()}
    training.model.embed.weight.data.mul_(0.5)  # from now on copies are there before anything goes on
    saving.finish()
    loaded = Training(ranks, 0)
    assert saving.load(loaded.state)
    assert equal(loaded.contents(), then)


def test_a_save_that_failed_beside_training_is_told_with_the_next(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, ranks, beside=True)
    training = Training(ranks, 1)

    def full(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "write_manifest", full)
        folder.checkpoints.save(1, training.state, {})
        folder.checkpoints._writer.join()
    assert folder.warnings == []
    folder.save(2, training.state, {"step": 2})
    assert len(folder.warnings) == 1
    assert "No space left on device" in folder.warnings[0]
    assert folder.checkpoints.load(training.state) == (tmp_path / "step-00000002", {"step": 2})


@pytest.mark.parametrize("beside", [False, True])
def test_a_disk_that_fills_up_is_told_of_before_and_costs_no_checkpoint(
    small_disk: Any, ranks: Ranks, beside: bool
) -> None:
    disk = small_disk.path
    folder = Folder(disk, ranks, beside=beside)
    training = Training(ranks, 1, width=20_000)
    taken = sum(tensor.nbytes for tensor in training.state.model_tensors().values())
    assert taken < 1 << 20
    folder.save(1, training.state, {"step": 1})
    assert folder.warnings == []
    filler = disk / "filler"
    filler.write_bytes(b"x" * (5 << 20))
    folder.save(2, training.state, {"step": 2})
    (told,) = folder.warnings
    assert f"the disk at {disk} has " in told
    assert "free some space (keep_checkpoints=1, [saturn] checkpoints_budget" in told
    small_disk.fill()
    told = rf"No space left.*{disk} has 0 kB of 8.4 MB left; free some space .*\. "
    told += r"It takes ([\d.]+ [kM]B) beside .* whole, \1 more than were free; .* goes on from step-00000002$"
    with pytest.raises(CheckpointError, match=told):
        folder.save(3, training.state, {"step": 3})
    assert sorted(path.name for path in disk.iterdir() if path != filler) == [
        "step-00000001",
        "step-00000002",
    ]
    assert folder.checkpoints.load(training.state) == (disk / "step-00000002", {"step": 2})
    small_disk.free()
    assert folder.save(3, training.state, {"step": 3}).is_dir()


def test_who_finds_no_checkpoint_since_they_were_taken_away_is_told(tmp_path: Path, ranks: Ranks) -> None:
    folder = Folder(tmp_path, ranks)
    assert folder.checkpoints.load(Training(ranks, 0).state) is None
    assert folder.warnings == []
    checkpoint_files.note_removed(tmp_path, ["step-00000004"], "[saturn] checkpoints_budget is 1 GB")
    assert folder.checkpoints.load(Training(ranks, 0).state) is None
    assert "are gone ([saturn] checkpoints_budget is 1 GB); starting from the beginning" in folder.warnings[0]


def test_what_somebody_has_put_beside_them_is_neither_read_nor_removed(tmp_path: Path, ranks: Ranks) -> None:
    folder = Folder(tmp_path, ranks, keep=1)
    folder.save(1, Training(ranks, 1).state, {"step": 1})
    copied = shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001-before-lunch")
    loaded = Training(ranks, 0)
    assert folder.checkpoints.load(loaded.state) == (tmp_path / "step-00000001", {"step": 1})
    folder.save(2, loaded.state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [copied.name, "step-00000002"]
    assert folder.warnings == []


def test_steps_are_counted_as_numbers(tmp_path: Path, ranks: Ranks) -> None:
    folder = Folder(tmp_path, ranks, keep=1)
    for step in (99_999_999, 100_000_000):
        folder.save(step, Training(ranks, 1).state, {"step": step})
    found = folder.checkpoints.load(Training(ranks, 0).state)
    assert found == (tmp_path / "step-100000000", {"step": 100_000_000})


@pytest.mark.parametrize("what", ["a file", "a link", "a link to nothing"])
def test_what_lies_in_the_place_of_an_old_one_costs_no_new_one(
    tmp_path: Path, ranks: Ranks, what: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    folder = Folder(tmp_path / "checkpoints", ranks, keep=1)
    folder.save(1, Training(ranks, 1).state, {"step": 1})
    old = folder.path / "step-00000001"
    old.rename(elsewhere)
    if what == "a file":
        old.touch()
    else:
        old.symlink_to(elsewhere if what == "a link" else tmp_path / "nothing")
    for step in (1, 2):
        folder.save(step, Training(ranks, step).state, {"step": step})
    assert [path.name for path in folder.path.iterdir()] == ["step-00000002"]
    assert (elsewhere / "manifest.json").exists(), "what a link leads to is not this folder's to remove"
    assert folder.warnings == []


def test_what_is_of_no_use_and_can_not_be_removed_costs_no_new_one(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path, ranks, keep=1)
    remove = shutil.rmtree

    def of_somebody_else(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == "step-00000001":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", of_somebody_else)
    for step in (1, 2, 3):
        folder.save(step, Training(ranks, step).state, {"step": step})
    (warning,) = folder.warnings
    assert "step-00000001 is of no use any more and can't be removed (Permission denied)" in warning


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE], ids=os.strerror)
@pytest.mark.parametrize("place", ["manifest.json", ".safetensors"])
@pytest.mark.parametrize("which", ["step-", "step-00000002"])
def test_what_may_be_whole_and_can_not_be_read_is_no_reason_to_start_over(
    two: dict[str, bytes],
    tmp_path: Path,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    place: str,
    which: str,
) -> None:
    lay(two, tmp_path)
    really = io.open

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if which in str(file) and str(file).endswith(place):
            raise OSError(number, os.strerror(number), str(file))
        return really(file, *args, **kwargs)

    folder = Folder(tmp_path, ranks)
    with monkeypatch.context() as patch:
        patch.setattr("io.open", opened)
        patch.setattr("builtins.open", opened)
        loaded = Training(ranks, 0)
        if number == errno.EACCES:
            with pytest.raises(CheckpointError, match=r"step-00000002 can't be read .*Permission denied"):
                folder.checkpoints.load(loaded.state)
        elif which == "step-":
            with pytest.raises(DiskError, match="look after that disk"):
                folder.checkpoints.load(loaded.state)
        else:
            assert folder.checkpoints.load(loaded.state) == (tmp_path / "step-00000001", {"step": 1})
            return
    assert folder.checkpoints.load(loaded.state) == (tmp_path / "step-00000002", {"step": 2})


def test_a_folder_of_checkpoints_that_can_not_be_listed_is_no_empty_one(
    two: dict[str, bytes], tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(two, tmp_path)
    folder, fails = Folder(tmp_path, ranks), OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, mock.Mock(side_effect=fails))
    with pytest.raises(DiskError, match="Stale file handle"):
        folder.checkpoints.load(Training(ranks, 0).state)
