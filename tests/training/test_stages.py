"""Cutting models into stages: with the results of the whole model, or refused for a reason."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from saturn_airflow.training import anatomy, stages
from saturn_airflow.training.blocks import find_blocks
from saturn_airflow.training.request import DoesNotFit
from saturn_airflow.training.stages import Cargo, Stage

CPU = torch.device("cpu")
works = st.floats(0, 10, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(before=works, blocks=st.lists(works, min_size=1, max_size=8), data=st.data())
def test_the_largest_stage_is_as_small_as_can_be(
    before: float, blocks: list[float], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(blocks)))
    inner = range(1, len(blocks))
    places = data.draw(st.sets(st.sampled_from(inner), min_size=count - 1)) if inner else set()
    cuts = stages.balance(before, blocks, sorted(places), count)
    assert len(cuts) == count - 1
    assert cuts == sorted(set(cuts) & places)

    def largest(edges: Sequence[int]) -> float:
        sums = [sum(blocks[a:b]) for a, b in itertools.pairwise((0, *edges, len(blocks)))]
        return max(sums[0] + before, *sums)

    best = min(largest(edges) for edges in itertools.combinations(sorted(places), count - 1))
    assert largest(cuts) == pytest.approx(best)


def in_stages(model: nn.Module, run: Callable[[nn.Module], torch.Tensor], count: int) -> list[nn.Module]:
    """``count`` stages of ``model`` with the gradients they compute, handing over what stages hand over."""
    found = anatomy.examine(model.train(), lambda: run(model), CPU)
    cuts = stages.choose_cuts(found, count)
    edges = [0, *cuts, len(found.blocks)]
    made: list[tuple[nn.Module, Stage]] = []
    for rank in range(count):
        part = copy.deepcopy(model)
        own = anatomy.examine(part, lambda part=part: run(part), CPU)
        keep = {p for p, ranks in stages.holders(own, cuts, part).items() if rank in ranks}
        made.append((part, Stage(part, own, range(edges[rank], edges[rank + 1]), keep, CPU)))
    arrived, entered, left = Cargo(), [], []
    for part, stage in made:
        result = stage.run(lambda part=part: run(part), (7, 0), arrived)
        if isinstance(result, Cargo):
            left.append(result.tensors)
            tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in result.tensors]
            entered.append(tensors)
            arrived = Cargo([t.clone() for t in tensors], list(result.returned))
    result.backward()
    for outputs, inputs in zip(reversed(left), reversed(entered), strict=True):
        pairs = [(o, i.grad) for o, i in zip(outputs, inputs, strict=True) if i.grad is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    for part, _ in made:
        part.loss = float(result.detach())
    return [part for part, _ in made]


def check_equal(model: nn.Module, run: Callable[[nn.Module], torch.Tensor], count: int) -> None:
    """Check that the stages' gradients add up to those of the whole model, and miss where those miss."""
    parts = in_stages(copy.deepcopy(model), run, count)
    whole = run(model.train())
    whole.backward()
    assert parts[0].loss == float(whole.detach())
    for name, parameter in model.named_parameters():
        found = [dict(part.named_parameters(remove_duplicate=False)).get(name) for part in parts]
        assert any(p is not None for p in found), name
        gradients = [p.grad for p in found if p is not None and p.grad is not None]
        assert bool(gradients) == (parameter.grad is not None), name
        if gradients:
            torch.testing.assert_close(sum(gradients), parameter.grad, rtol=1e-13, atol=1e-13)


class Model(nn.Module):
    """Four blocks, and something special about them."""

    def __init__(self, special: str = "") -> None:
        super().__init__()
        self.special = special
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.last = nn.Linear(6, 6)
        self.position = nn.Parameter(torch.randn(6))
        self.never = nn.Parameter(torch.randn(2))
        self.register_buffer("count", torch.zeros(()))
        if special == "tied to a block":
            self.last.weight = self.blocks[1].linear.weight
        if special == "tied blocks":
            self.blocks[3].linear.weight = self.blocks[0].linear.weight
        if special == "tied ends":
            self.first = nn.Linear(6, 6)
            self.last.weight = self.first.weight
        if special == "frozen":
            self.first.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
        if special == "parameter of another":
            self.blocks[2].other = [self.position]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        special = self.special
        x = torch.cat([x, x[:, :2]], 1) if special == "tied ends" else x
        x = self.first(x)
        blocks, kept = list(self.blocks), []
        if special == "other order":
            blocks.reverse()
        if special == "twice":
            blocks += blocks
        if special == "one skipped":
            blocks.pop()
        if special == "counts":
            self.count += 1
        if special == "decides" and bool(self.position.sum() > 0):
            x = x + self.position
        for number, block in enumerate(blocks):
            kept.append(x)
            if special == "between":
                x = self.norms[number % 2](x) * self.position
            if special == "a long way" and number == 3:
                x = x + kept[1]
            if special == "decides by hidden states" and bool(x.sum() > 0):
                x = x + 1
            if special == "trained extra":
                x = block(x, self.position * 2)
            elif special == "keyword":
                x = block(x=x)
            elif special == "tuple":
                x, extra = block((x, x * 2))
                x = x + extra
            elif special == "same twice":
                x, again = block((x, x))
                x = x + again
            elif special == "written in place":
                block(x, out=x)
            else:
                x = block(x)
        if special == "layer drop" and torch.rand([]) < 0.01:
            x = self.blocks[0](x)
        if special == "all hidden states":
            x = x + torch.stack(kept).mean(0)
        if special == "side loss":
            x = x + sum(block.side for block in self.blocks)
        if special == "from the start":
            x = x + kept[0]
        return self.last(x + self.position).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.other: list[nn.Parameter] = []

    def forward(self, x: Any, extra: torch.Tensor | None = None, out: torch.Tensor | None = None) -> Any:
        if isinstance(x, tuple):
            return torch.tanh(self.linear(x[0])), x[1] + x[0]
        if extra is not None:
            x = x + extra
        result = torch.tanh(self.linear(x)) + sum(self.other)
        self.side = result.mean()
        if out is not None:
            out.data.copy_(result)
        return result


INPUTS = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

WORKS = ["", "tied to a block", "tied blocks", "tied ends", "frozen", "parameter of another", "between"]
WORKS += ["decides", "trained extra", "keyword", "tuple", "same twice", "from the start"]


@pytest.mark.parametrize("special", WORKS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_compute_what_the_model_computes(special: str, count: int) -> None:
    torch.manual_seed(1)
    check_equal(Model(special).double(), lambda model: model(INPUTS), count)


def test_what_belongs_together_is_not_cut() -> None:
    torch.manual_seed(1)
    model = Model("a long way").double()
    found = anatomy.examine(model, lambda: model(INPUTS), CPU)
    assert found.places == [3]
    check_equal(model, lambda model: model(INPUTS), 2)
    with pytest.raises(DoesNotFit, match=r"3' uses what block 'blocks.0' computed"):
        stages.choose_cuts(found, 3)


@pytest.mark.parametrize(
    ("special", "says"),
    [
        ("other order", "does not call its blocks ('blocks.0' and on) once each and in order, but blocks.3"),
        ("twice", "does not call its blocks ('blocks.0' and on) once each and in order, but blocks.0, blo"),
        ("one skipped", "once each and in order, but blocks.0, blocks.1, blocks.2"),
        ("layer drop", "does not call its blocks ('blocks.0' and on) once each and in order"),
        ("decides by hidden states", "what the model does before block 'blocks.1' depends on values that"),
        ("all hidden states", "what comes after the blocks uses what block 'blocks.0' computed"),
        ("side loss", "what comes after the blocks uses what block 'blocks.0' computed"),
        ("written in place", "uses what block 'blocks.0' computed"),
        ("counts", "buffer 'count' changes in every forward pass"),
        ("fails", "the model can't be run on a micro-batch alone: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_refuses_for_a_reason(special: str, says: str) -> None:
    model = Model(special).double()
    inputs = INPUTS[:, :2] if special == "fails" else INPUTS
    with pytest.raises(DoesNotFit) as refused:
        stages.choose_cuts(anatomy.examine(model, lambda: model(inputs), CPU), 2)
    assert says in str(refused.value)


def test_too_few_blocks_are_refused() -> None:
    model = Model().double()
    found = anatomy.examine(model, lambda: model(INPUTS), CPU)
    with pytest.raises(DoesNotFit, match="the model has 4 repeated blocks, too few for 5 stages"):
        stages.choose_cuts(found, 5)
    for cuts in ([0], [4], [2, 1], [1, 2]):
        with pytest.raises(DoesNotFit, match="do not make 2 stages of this model, which has 4 blocks"):
            stages.check_cuts(found, cuts, 2)
    stages.check_cuts(found, [3], 2)
    with pytest.raises(DoesNotFit, match="no repeated blocks"):
        anatomy.examine(nn.Linear(2, 2), lambda: 0, CPU)


def test_examining_leaves_the_model_as_it_was() -> None:
    model = Model().double()
    before = {name: (id(p), p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    found = anatomy.examine(model, lambda: model(INPUTS), CPU)
    assert all("forward" not in vars(block) for _, block in found.blocks)
    for name, parameter in model.named_parameters():
        assert (id(parameter), parameter.data_ptr()) == before[name][:2]
        assert torch.equal(parameter, before[name][2])
        assert parameter.grad is None


def test_a_stage_holds_what_it_needs_and_no_more() -> None:
    parts = in_stages(Model().double(), lambda model: model(INPUTS), 4)
    names = [{name for name, _ in part.named_parameters()} - {"never"} for part in parts]
    block = [{f"blocks.{i}.linear.weight", f"blocks.{i}.linear.bias"} for i in range(4)]
    norms = {f"norms.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")}
    assert names[0] - norms == {"first.weight", "first.bias"} | block[0]
    assert names[1] - norms == block[1]
    assert names[2] - norms == block[2]
    assert names[3] - norms == {"last.weight", "last.bias", "position"} | block[3]


def test_blocks_are_the_largest_repeated_modules() -> None:
    model = nn.Sequential(
        nn.ModuleList([nn.Linear(2, 2)] * 1), nn.Sequential(*[Block() for _ in range(2)], nn.Linear(6, 99))
    )
    assert [name for name, _ in find_blocks(model)] == ["1.0", "1.1"]
    assert find_blocks(nn.Linear(2, 2)) == []
