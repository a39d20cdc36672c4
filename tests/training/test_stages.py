"""Cutting models into stages: with the results of the whole model, or refused for a reason."""

# Models without types.
# mypy: disable-error-code="index, misc, no-any-return, no-untyped-call, operator, union-attr"

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism import anatomy, stages
from saturn_airflow.parallelism.blocks import find_blocks
from saturn_airflow.parallelism.stages import Stage, StageOutputs, TensorLike

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
    arrived, entered, left = StageOutputs(), [], []
    for part, stage in made:
        result = stage.run(lambda part=part: run(part), (7, 0), arrived)
        if isinstance(result, StageOutputs):
            left.append(result.tensors)
            tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in result.tensors]
            entered.append(tensors)
            arrived = StageOutputs([t.clone() for t in tensors], list(result.returned))
    result.backward()
    for outputs, inputs in zip(reversed(left), reversed(entered), strict=True):
        pairs = [(o, i.grad) for o, i in zip(outputs, inputs, strict=True) if i.grad is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))  # type: ignore[arg-type]
    for part, _ in made:
        part.loss = float(result.detach())  # type: ignore[assignment]
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
        self.way = ""
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.last = nn.Linear(6, 6)
        self.position = nn.Parameter(torch.randn(6))
        self.never = nn.Parameter(torch.randn(2))
        self.register_buffer("count", torch.zeros(()))
        if special == "tied to a block":
            self.last.weight = self.blocks[1].linear.weight  # type: ignore[assignment]
        if special == "tied blocks":
            self.blocks[3].linear.weight = self.blocks[0].linear.weight
        if special == "tied ends":
            self.first = nn.Linear(6, 6)
            self.last.weight = self.first.weight
        if special == "frozen":
            self.first.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
        if special == "parameter of another":
            self.blocks[2].other = [self.position]  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        special, inputs = self.special, x
        x = torch.cat([x, x[:, :2]], 1) if special == "tied ends" else x
        x = self.first(x)
        blocks, kept = list(self.blocks), []
        blocks = {"other order": blocks[::-1], "twice": blocks * 2}.get(special, blocks)
        turned = bool(inputs[0, 0] > 0)
        if special == "another way" and turned:
            blocks = {"skip": blocks[:3], "back": blocks[::-1]}.get(self.way, blocks)
        if special == "one skipped":
            blocks.pop()
        if special == "counts":
            self.count += 1  # type: ignore[assignment]
        if special == "teaches":
            self.position.mul_(0.9)
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
            elif special == "catches everything":
                try:
                    x = block(x)
                except BaseException:
                    x = x * 0
            elif special == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)
            elif special == "index":
                x = block(x, index=number, compute=None)
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
        if special == "another way" and turned:
            x = {"first": x + self.first.bias, "kept": x + kept[1]}.get(self.way, x)
        return self.last(x + self.position).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.other: list[nn.Parameter] = []

    def forward(
        self, x: Any, extra: torch.Tensor | None = None, out: torch.Tensor | None = None, **names: Any
    ) -> Any:
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
WORKS += ["decides", "trained extra", "keyword", "tuple", "same twice", "from the start", "index"]
WORKS += ["catches everything"]


@pytest.mark.slow
@pytest.mark.parametrize("special", WORKS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_compute_what_the_model_computes(special: str, count: int) -> None:
    torch.manual_seed(1)
    check_equal(Model(special).double(), lambda model: model(INPUTS), count)


def test_a_model_is_looked_at_on_its_device_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = Model("").double(), torch.device("cpu", 0)
    there: list[int] = []
    held = 0

    @contextmanager
    def moved_to(tensors: Any, where: torch.device) -> Iterator[None]:
        nonlocal held
        assert where == device
        size = sum(tensor.numel() for tensor in tensors)
        held += size
        there.append(held)
        yield
        held -= size

    monkeypatch.setattr(anatomy, "_moved_to", moved_to)
    anatomy.examine(model, lambda: model(INPUTS), device)
    blocks = [sum(p.numel() for p in block.parameters()) for _, block in find_blocks(model)]
    rest = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) - sum(blocks)
    assert there == [rest, *(rest + size for size in blocks)]


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
        ("layer drop", "if it leaves out blocks by chance (LayerDrop), switch that off"),
        ("decides by hidden states", "what the model does before block 'blocks.1' depends on values that"),
        ("all hidden states", "what comes after the blocks uses what block 'blocks.0' computed"),
        ("side loss", "what comes after the blocks uses what block 'blocks.0' computed"),
        ("written in place", "uses what block 'blocks.0' computed"),
        ("counts", "buffer 'count' changes in every forward pass"),
        ("teaches", "parameter 'position' changes in every forward pass"),
        ("fails", "the model can't be run on a micro-batch alone: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_refuses_for_a_reason(special: str, says: str) -> None:
    model = Model(special).double()
    model.position.requires_grad_(special != "teaches")
    inputs = INPUTS[:, :2] if special == "fails" else INPUTS
    with pytest.raises(DoesNotFit) as refused:
        stages.choose_cuts(anatomy.examine(model, lambda: model(inputs), CPU), 2)
    assert says in str(refused.value)


def test_checkpoints_around_blocks_are_refused() -> None:
    with pytest.raises(DoesNotFit, match="called outside of the model's forward pass, as by gradient check"):
        in_stages(Model("checkpointed").double(), lambda model: model(INPUTS), 2)


@pytest.mark.parametrize(
    ("way", "says"),
    [("first", ""), ("kept", ""), ("skip", "did not call block"), ("back", "when it was the turn of")],
)
def test_what_a_stage_lacks_is_never_trained_with(way: str, says: str) -> None:
    """A model that takes another way than before, through weights and blocks that the stage does not have."""
    model = Model("another way").double()
    model.way = way
    found = anatomy.examine(model, lambda: model(INPUTS), CPU)
    assert stages.choose_cuts(found, 2) == [2]
    keep = {p for p, ranks in stages.holders(found, [2], model).items() if 1 in ranks}
    stage = Stage(model, found, range(2, 4), keep, CPU)
    hidden = TensorLike((3, 6), torch.float64)
    arrived = StageOutputs([torch.ones(3, 6, dtype=torch.float64)], [hidden, hidden])
    if says:
        with pytest.raises(DoesNotFit, match=says):
            stage.run(lambda: model(-INPUTS), (1,), arrived)
    else:
        assert stage.run(lambda: model(-INPUTS), (1,), arrived).isnan()


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


class Dropping(nn.Module):
    """Blocks that only drop, and a sum of what they kept."""

    def __init__(self, size: int = 4096) -> None:
        super().__init__()
        self.before = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(4))
        self.weights = torch.arange(1, size + 1, dtype=torch.float64).sqrt()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.before(torch.ones_like(x))
        for block in self.blocks:
            x = block(x)
            x = x * (1 + 0.1 * torch.rand_like(x))
        return (torch.nn.functional.dropout(x) * self.weights).sum()


class DroppingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5) > 0
        return x + self.mask * self.scale


def test_masks_do_not_depend_on_the_stages_they_are_drawn_in() -> None:
    x = torch.zeros(2048, dtype=torch.float64)
    losses = [in_stages(Dropping(2048), lambda model: model(x), count)[0].loss for count in (1, 2, 3, 4)]
    assert losses == [losses[0]] * 4


def test_masks_of_blocks_micro_batches_and_steps_are_independent() -> None:
    x = torch.zeros(4096, dtype=torch.float64)
    model = Dropping()
    found = anatomy.examine(model.train(), lambda: model(x), CPU)
    stage = Stage(model, found, range(4), set(model.parameters()), CPU)
    masks = []
    for position in itertools.product((11, 12), (0, 1)):  # a step's seed, and the number of a piece
        stage.run(lambda: model(x), position, StageOutputs())
        masks += [block.mask for block in model.blocks]
    assert len(masks) == 16
    for one, other in itertools.combinations(masks, 2):
        # Of 4096 elements, half of them should agree; six standard deviations are 192.
        assert abs(int((one == other).sum()) - 2048) < 192  # type: ignore[attr-defined]
    stage.run(lambda: model(x), (11, 0), StageOutputs())
    assert torch.equal(model.blocks[2].mask, masks[2])  # type: ignore[arg-type]


class Layers(nn.Module):
    """A random model: layers in a row, with odd ways around them."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        some, flag = st.integers(0, 3), st.booleans()
        widths = draw(st.lists(st.integers(1, 5), min_size=5, max_size=7))
        self.first = nn.Linear(3, widths[0])
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleDict({str(draw(some)): nn.LayerNorm(1) for _ in range(draw(some))})
        self.last = nn.Linear(widths[-1], 1)
        self.shift = nn.Parameter(torch.ones(1)) if draw(flag) else None
        self.idle = nn.Parameter(torch.ones(2))
        self.ways = {(draw(some), draw(some)) for _ in range(draw(st.sampled_from([0, 0, 1, 2])))}
        self.ends = {kind for kind in ("mean", "start", "shift") if draw(st.integers(0, 5)) == 0}
        for layer in self.layers:
            if draw(st.integers(0, 4)) == 0:
                layer.requires_grad_(False)
            if layer.weight.shape == self.layers[0].weight.shape and draw(flag):
                layer.weight = self.layers[0].weight
        self.first.requires_grad_(draw(flag))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        kept = []
        for number, layer in enumerate(self.layers):
            kept.append(x)
            for start, end in self.ways:
                if end == number and start <= number:
                    x = x + kept[start].mean(-1, keepdim=True)
            if str(number) in self.norms:
                x = self.norms[str(number)](x[..., None])[..., 0] + x
            if self.shift is not None and number % 2:
                x = x * self.shift
            x = torch.tanh(layer(x))
        if "mean" in self.ends:
            x = x + sum(k.mean() for k in kept)
        if "start" in self.ends:
            x = x + kept[0].mean()
        if "shift" in self.ends and self.shift is not None:
            x = x + self.shift
        return self.last(x).square().mean()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_models_are_exact_or_refused(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    model = Layers(data.draw).double()
    count = data.draw(st.integers(2, 4))
    x = torch.randn(4, 3, dtype=torch.float64)
    found = anatomy.examine(model.train(), lambda: model(x), CPU)
    if len(found.places) < count - 1:
        assert model.ways or "mean" in model.ends
        with pytest.raises(DoesNotFit, match="uses what block"):
            stages.choose_cuts(found, count)
    else:
        check_equal(model, lambda model: model(x), count)


def test_blocks_are_the_largest_repeated_modules() -> None:
    model = nn.Sequential(
        nn.ModuleList([nn.Linear(2, 2)] * 1), nn.Sequential(*[Block() for _ in range(2)], nn.Linear(6, 99))
    )
    assert [name for name, _ in find_blocks(model)] == ["1.0", "1.1"]
    assert find_blocks(nn.Linear(2, 2)) == []
