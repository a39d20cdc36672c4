"""Cutting models into stages: balanced, with every parameter where it is used, or refused for a reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from saturn_airflow.training import stages
from saturn_airflow.training.blocks import find_blocks
from saturn_airflow.training.request import DoesNotFit

times = st.floats(0, 10, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(before=times, blocks=st.lists(times, min_size=1, max_size=8), after=times, data=st.data())
def test_the_slowest_stage_is_as_fast_as_can_be(
    before: float, blocks: list[float], after: float, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(blocks)))
    cuts = stages.balance(before, blocks, after, count)
    assert len(cuts) == count
    assert [i for cut in cuts for i in cut] == list(range(len(blocks)))
    assert all(cuts)

    def slowest(edges: tuple[int, ...]) -> float:
        sums = [sum(blocks[a:b]) for a, b in itertools.pairwise((0, *edges, len(blocks)))]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    best = min(slowest(edges) for edges in itertools.combinations(range(1, len(blocks)), count - 1))
    assert slowest(tuple(cut.stop for cut in cuts[:-1])) == pytest.approx(best)


class Model(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(6, 4, bias=False)
        self.position = nn.Parameter(torch.randn(6))
        self.never = nn.Parameter(torch.randn(2))
        if fault == "tied to a block":
            self.last.weight = nn.Parameter(torch.randn(4, 6))
            self.blocks[1].extra = self.last.weight
        if fault == "tied blocks":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        blocks = list(self.blocks)
        if self.fault == "other order":
            blocks.reverse()
        if self.fault == "twice":
            blocks += blocks
        for block in blocks:
            if self.fault == "trained extra":
                x = block(x, self.position * 2)
            elif self.fault == "keyword":
                x = block(x=x)
            else:
                x = block(x)
        return self.last(x + self.position).sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def anatomy(model: nn.Module, count: int = 2) -> stages.Anatomy:
    return stages.find_anatomy(model, lambda: model(torch.ones(1, 4)), count)


def names(model: nn.Module, parameters: Any) -> set[str]:
    return {name for name, p in model.named_parameters() if p in parameters}


def test_finds_what_is_before_and_after_the_blocks() -> None:
    model = Model()
    model.first.requires_grad_(False)
    found = anatomy(model)
    assert [name for name, _ in found.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(model, found.before) == {"first.weight", "first.bias"}
    assert names(model, found.after) == {"last.weight", "position"}
    assert not model.first.weight.requires_grad
    assert model(torch.ones(1, 4)).requires_grad


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("other order", "does not call its blocks ('blocks.0' and on) once each and in order"),
        ("twice", "does not call its blocks ('blocks.0' and on) once each and in order"),
        ("trained extra", "block 'blocks.0' takes more than hidden states from what is trained before it"),
        ("keyword", "block 'blocks.0' does not take hidden states as its first argument"),
        ("tied to a block", "parameter 'blocks.1.extra' is used inside and outside of the blocks"),
        ("tied blocks", "the model's blocks ('blocks.0' and on) share parameters"),
    ],
)
def test_refuses_for_a_reason(fault: str, says: str) -> None:
    with pytest.raises(DoesNotFit) as refused:
        anatomy(Model(fault))
    assert says in str(refused.value)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(DoesNotFit, match="the model has 3 repeated blocks, too few for 4 stages"):
        anatomy(Model(), 4)


def test_every_parameter_is_kept_by_the_stages_that_use_it() -> None:
    kept: list[set[str]] = []
    for own in (range(1), range(1, 2), range(2, 3)):
        model = Model()
        stages.cut(model, anatomy(model), own, torch.device("cpu"), lambda like: like)
        kept.append({name for name, _ in model.named_parameters()})
    assert kept[0] == {
        "first.weight",
        "first.bias",
        "never",
        "blocks.0.linear.weight",
        "blocks.0.linear.bias",
    }
    assert kept[1] == {"blocks.1.linear.weight", "blocks.1.linear.bias"}
    assert kept[2] == {"blocks.2.linear.weight", "blocks.2.linear.bias", "last.weight", "position"}


def test_stages_after_another_give_what_the_model_gives() -> None:
    torch.manual_seed(0)
    whole = Model()
    x = torch.randn(1, 4)
    expected = whole(x)
    carried = torch.empty(0)
    for own in (range(2), range(2, 3)):
        model = Model()
        model.load_state_dict(whole.state_dict())
        stages.cut(model, anatomy(model), own, torch.device("cpu"), lambda like, carried=carried: carried)
        try:
            result = model(x)
        except stages.LeaveForward as left:
            carried = left.hidden
    assert torch.equal(result, expected)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = Model()
    found = anatomy(model)
    before, blocks, after = stages.measure(model, found, lambda: model(torch.ones(1, 4)), torch.device("cpu"))
    assert before > 0
    assert after >= 0
    assert len(blocks) == 3
    assert len(set(blocks)) == 1
    assert all("forward" not in vars(block) for _, block in found.blocks)
    assert all(p.grad is None for p in model.parameters())


def test_blocks_are_the_largest_repeated_modules() -> None:
    model = nn.Sequential(
        nn.ModuleList([nn.Linear(2, 2)] * 1), nn.Sequential(*[Block() for _ in range(2)], nn.Linear(6, 99))
    )
    assert [name for name, _ in find_blocks(model)] == ["1.0", "1.1"]
    assert find_blocks(nn.Linear(2, 2)) == []
