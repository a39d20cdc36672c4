"""Models that are compiled as a whole, in parts or by blocks, where techniques run blocks one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.blocks import blocks_to_run


def as_a_whole() -> nn.Module:
    compiled: nn.Module = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), backend="eager")  # type: ignore[assignment]
    return compiled


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.compile(backend="eager")
    return model


def compiled_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (as_a_whole, "a model that"),
        (compiled_in_place, "a model that its compile"),
        (compiled_forward, "a model that"),
        (lambda: nn.Sequential(nn.Linear(2, 3), compiled_in_place()), "a model whose part '1'"),
    ],
)
def test_what_is_compiled_around_blocks_says_how_to_compile_blocks(
    make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(DoesNotFit, match=rf"{words}.*HParams\(compile=True\)"):
        blocks_to_run(make())


def test_what_is_compiled_beside_blocks_is_run_as_it_is() -> None:
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    beside = nn.Linear(2, 2)
    for module in (*blocks, beside):
        module.compile(backend="eager")
    assert len(blocks_to_run(nn.ModuleDict({"blocks": blocks, "beside": beside}))) == 2
