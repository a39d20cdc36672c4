"""What a checkpoint is written from while training goes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import Folder, Training
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worst_order import WorstOrder

from saturn_airflow.training import job_training, staging, tensor_files
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.staging import Staging, lie_on_device, own_part

CPU = torch.device("cpu")
TENSORS = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "flags": torch.tensor([1, 0, 1], dtype=torch.uint8),
    "none": torch.empty(0, 4),
    "large": torch.arange(5000.0),
}


@pytest.mark.parametrize("slab", [256, 4096, 2**20])
def test_copies_stay_as_they_are_and_take_the_same_room_again(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_SLAB", slab)
    room, tensors = Staging(CPU), {name: tensor.clone() for name, tensor in TENSORS.items()}
    first = room.copies(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(first[name], tensor) for name, tensor in TENSORS.items())
    taken = [len(one) for one in room._slabs]
    assert all(length & (length - 1) == 0 for length in taken)
    assert staging.room_for(tensors) == sum(taken)
    second = room.copies(TENSORS)
    assert [len(one) for one in room._slabs] == taken
    assert all(second[name].data_ptr() == copy.data_ptr() for name, copy in first.items() if copy.numel())
    assert all(torch.equal(second[name], tensor) for name, tensor in TENSORS.items())


LATE = ("weight", "half", "large")


@settings(max_examples=60, deadline=None)
@given(late=st.lists(st.booleans(), min_size=12, max_size=12), rounds=st.integers(1, 4), soon=st.booleans())
def test_copies_that_come_late_are_what_was_there(late: list[bool], rounds: int, soon: bool) -> None:
    saved_as_it_was(WorstOrder(functools.partial(_next, iter(late * rounds))), rounds, soon=soon)


def _next(answers: Iterator[bool], line: str) -> bool:
    return next(answers, True)


@pytest.mark.parametrize("missing", ["compute_after", "wait", "before_changes"])
def test_each_wait_that_is_missing_shows(missing: str) -> None:
    with pytest.raises(AssertionError, match=r"differ|NaN"):
        saved_as_it_was(WorstOrder(lambda line: True, missing), 3, missing, soon=missing == "wait")


def saved_as_it_was(transfers: WorstOrder, rounds: int, missing: str = "", *, soon: bool = False) -> None:
    """Copy, have the forward pass change what it may, await, have the step change the rest, await, compare.

    :param soon: whether who writes the copies gets to it before the step.
    """
    room = Staging(CPU, transfers)
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    for number in range(rounds):
        then = {name: tensor.clone() for name, tensor in tensors.items()}
        copies = room.copies(tensors, LATE)
        for name in tensors.keys() - set(LATE):
            tensors[name] += 1  # as buffers in the forward pass
        if soon:
            room.wait()
            assert all(torch.equal(copies[name], tensor) for name, tensor in then.items()), "copies differ"
        if missing != "before_changes":
            room.before_changes()
        for name in LATE:
            tensors[name] += number + 1  # as weights in the optimizer's step
        room.wait()
        same = all(torch.equal(copies[name], tensor) for name, tensor in then.items())
        assert room.changed() is None or not same, "what is right is taken for wrong"
        assert same, f"copies differ, and {room.changed()} is told" if room.changed() else "unnoticed"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_what_begins_anywhere_in_memory_is_not_taken_for_changed(dtype: torch.dtype) -> None:
    room = Staging(CPU)
    room.copies({"a view": torch.arange(9).to(dtype)[1:], "another order": torch.ones(3, 4, dtype=dtype).t()})
    room.wait()
    assert room.changed() is None


def test_a_shard_is_copied_as_what_it_is_of_the_whole(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        copy = Staging(CPU).copies({"shard": whole})["shard"]
        assert isinstance(copy, DTensor)
        assert (copy.placements, copy.device_mesh) == (whole.placements, whole.device_mesh)
        whole.to_local().zero_()
        assert torch.equal(copy.to_local(), torch.arange(6.0))
    finally:
        dist.destroy_process_group()


def test_a_model_that_lies_on_the_host_is_not_copied_there() -> None:
    def on(device: str, numbers: int) -> Any:
        place = SimpleNamespace(type=device)
        return SimpleNamespace(device=place, numel=lambda: numbers, element_size=lambda: 4)

    spilled = {"blocks": on("cpu", 900), "embedding": on("cuda", 100)}
    assert not lie_on_device(spilled)
    assert lie_on_device({**spilled, "blocks that stay": on("cuda", 1000)})


def test_what_several_hold_is_written_by_one() -> None:
    alike = {f"weight {n}": torch.zeros(1 + n) for n in range(9)}
    held = [{**alike, "of 0": torch.zeros(50)}, dict(alike), {**alike, "of 2": torch.zeros(3)}]

    def everyones(value: Any) -> list[Any]:
        return [{name: tensor.nbytes for name, tensor in tensors.items()} for tensors in held]

    parts = [own_part(tensors, rank, everyones) for rank, tensors in enumerate(held)]
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted({name for tensors in held for name in tensors})
    assert ["of 0" in parts[0], "of 2" in parts[2]] == [True, True]
    # Who has much of its own gets less of what all have.
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert sizes[0] == 200
    assert abs(sizes[1] - sizes[2]) <= 16


@pytest.mark.parametrize(
    ("beside", "copying", "rest"), [(True, 3.0, 57.0), (False, 3.0, 57.0), (False, 1.0, 0.0)]
)
def test_saving_takes_a_twentieth_of_the_time_at_most(
    beside: bool, copying: float, rest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    slow, part = (Staging, "wait") if beside else (tensor_files, "write_manifest")
    own: Any = getattr(slow, part)

    def takes_its_time(*given: Any) -> Any:
        now[0] += copying
        return own(*given)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(slow, part, takes_its_time)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        ranks = Ranks(rank=0, size=1, device=CPU)
        folder = Folder(tmp_path, ranks, beside=beside)
        folder.checkpoints.save(2, Training(ranks, 2).state, {})
        folder.checkpoints.finish()
    finally:
        dist.destroy_process_group()
    assert folder.checkpoints.rest_seconds == rest
    asked = SimpleNamespace(checkpoint_batches=None, checkpoint_seconds=10.0)
    loop: Any = SimpleNamespace(
        request=asked, checkpoints=folder.checkpoints, step=0, tried_step=0, tried_at=now[0]
    )
    is_due = job_training.Training._save_due
    due_at = now[0] + max(rest, 10.0)
    assert [is_due(loop, due_at - 0.1), is_due(loop, due_at)] == [False, True]
