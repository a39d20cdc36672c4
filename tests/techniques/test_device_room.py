"""What techniques put on a device: never a whole model that they then take apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import llama
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor

from saturn_airflow import library
from saturn_airflow.parallelism.blocks import find_blocks
from saturn_airflow.training.ranks import Ranks

RANKS = Ranks(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def numbers(module: nn.Module) -> int:
    """Those of its parameters that are not cut."""
    return sum(p.numel() for p in module.parameters() if not isinstance(p, DTensor))


def test_fsdp_moves_one_unit_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    blocks = [numbers(block) for _, block in find_blocks(model)]
    rest = numbers(model) - sum(blocks)
    moved: list[int] = []
    move = _fsdp_init._move_states_to_device

    def noted(parameters: Any, *others: Any) -> None:
        moved.append(sum(p.numel() for p in parameters))
        move(parameters, *others)

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a whole module is moved")

    monkeypatch.setattr(_fsdp_init, "_move_states_to_device", noted)
    monkeypatch.setattr(nn.Module, "to", to)
    library.get("fsdp").parallelize(model, RANKS)
    assert moved == [*blocks, rest]


def test_tensor_moves_whole_what_it_has_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    layers = [m for _, block in find_blocks(model) for m in block.modules() if isinstance(m, nn.Linear)]
    sizes = list(map(numbers, layers))
    uncut = numbers(model) - sum(sizes)
    moved: list[int] = []
    to = nn.Module.to

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved.append(numbers(self))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", noted)
    library.get("tensor").parallelize(model, RANKS)
    *cut, last = moved
    assert sorted(cut) == sorted(sizes)
    assert last == numbers(model) == uncut
