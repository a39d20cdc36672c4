"""Spilling while copies come as late as they may: every wait that is missing shows in the gradients."""

# Models without types.
# mypy: disable-error-code="index, misc, no-any-return, no-untyped-call, operator, union-attr"

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worst_order import WorstOrder

from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.beside_steps import _WATCHED
from saturn_airflow.parallelism.block_stream import BlockStream
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.parallelism.transfers import Buffers, Done
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.slow

WIDTH = 6


class Block(nn.Module):
    """A matrix that is cast under autocast, one that is also used as it is, one that may be frozen, and one
    that takes no part in the loss."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.cast = nn.Linear(WIDTH, WIDTH)
        self.both = nn.Linear(WIDTH, WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen)
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(torch.tanh(self.cast(self.norm(x))) + self.base(x))
        return x + self.both(x) * self.both.weight.mean()


def model_of(depth: int, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), *(Block(frozen) for _ in range(depth)), nn.Linear(WIDTH, 3))


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets).square().mean()


def of_some(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss over those samples that count."""
    counts = targets[:, 0] > 0
    return (outputs.float() - targets).square().mean(1)[counts].sum(), counts.sum()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


RANKS = Ranks(rank=0, size=1, device=torch.device("cpu"))
# The same in every run: by chance no sample of a batch would count, and its loss be a mean over nothing.
CHANCE = torch.Generator().manual_seed(0)
BATCHES = [[torch.randn(5, size, generator=CHANCE) for size in (4, 3)] for _ in range(2)]


def trained(
    depth: int,
    frozen: bool,
    precision: str,
    micro_batches: int,
    clip: bool,
    optimizer: str = "AdamW",
    loss: str = "mean_square",
    evaluates: bool = True,
    **spilled: Any,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and weights after four steps, with an evaluation after each; plain without ``spilled``."""
    model = model_of(depth, frozen)
    job = Job("j", "x:y", "x:y", f"test_transfers:{loss}", hparams=HParams(precision=precision))
    objective = Objective(job, model, RANKS.device)
    parallel = Spilled(model, RANKS, **{"folder": None, **spilled}) if spilled else Parallel(model, RANKS)
    steps = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad], lr=0.05)
    samples = 5 * micro_batches
    losses = []
    for step in range(4):
        if not clip:
            parallel.step_beside(steps)
        objective.begin(samples)
        counted = 0.0
        for number in range(micro_batches):
            torch.manual_seed(10 * step + number)
            last = number == micro_batches - 1
            total, over = parallel.backward(objective, BATCHES[number % 2], 5, 1 / samples, last)
            losses.append(total)
            counted += float(over)
        parallel.finish_gradients()
        if counted != samples:
            parallel.scale_gradients(samples / counted)
        if spilled:
            left = sum(block.cast.weight.grad is not None for block in list(model)[1:-1])  # type: ignore[call-overload]
            assert left == (depth if clip else min(spilled.get("stay", 0), depth - 1))
        if clip:
            parallel.step_later(steps)
            parallel.clip_gradients(0.1)
        if spilled and clip:
            left = sum(block.cast.weight.grad is not None for block in list(model)[1:-1])  # type: ignore[call-overload]
            later = (step + 1) * micro_batches >= _WATCHED
            assert left == (min(spilled.get("stay", 0), depth - 1) if later else depth)
        steps.step()
        for group in steps.param_groups:
            group["lr"] *= 0.9
        parallel.drop_gradients()
        torch.manual_seed(step)
        if evaluates:
            with torch.no_grad():
                losses.append(parallel.evaluate(objective, BATCHES[0], 5)[0])
            parallel.finish_evaluating()
    parallel.complete_steps()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def differs(
    one: tuple[list[torch.Tensor], dict[str, torch.Tensor]],
    other: tuple[list[torch.Tensor], dict[str, torch.Tensor]],
) -> bool:
    return not (
        all(map(torch.equal, one[0], other[0]))
        and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    )


@pytest.mark.timeout(2400)
@settings(max_examples=25, deadline=None)
@given(
    depth=st.integers(2, 5),
    resident=st.integers(2, 4),
    stay=st.integers(0, 5),
    frozen=st.booleans(),
    precision=st.sampled_from(["float32", "bf16"]),
    micro_batches=st.integers(1, 3),
    clip=st.booleans(),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    loss=st.sampled_from(["mean_square", "of_some"]),
    evaluates=st.booleans(),
    in_files=st.booleans(),
    late=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_late_copies_change_nothing(
    depth: int,
    resident: int,
    stay: int,
    frozen: bool,
    precision: str,
    micro_batches: int,
    clip: bool,
    optimizer: str,
    loss: str,
    evaluates: bool,
    in_files: bool,
    late: list[bool],
) -> None:
    how = (depth, frozen, precision, micro_batches, clip, optimizer, loss, evaluates)
    order = itertools.cycle(late)
    transfers = WorstOrder(lambda line: next(order))
    folder = tempfile.gettempdir() if in_files else None
    spilled = trained(*how, resident=resident, stay=stay, transfers=transfers, folder=folder)
    assert not differs(trained(*how), spilled)
    transfers.check()


def forget_to_wait(what: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take a wait away; what is broken of the transfers by that."""
    if what == "before a buffer is used again":
        give_back = Buffers.give_back
        monkeypatch.setattr(
            Buffers, "give_back", lambda self, buffer, _: give_back(self, buffer, lambda: None)
        )
    if what == "for what is to be added":
        monkeypatch.setattr(BlockStream, "finish", lambda self: self._on_device.clear())
    if what == "before a step":
        begin = WorstOrder.begin

        def at_once(self: Any, lane: Any, work: Any) -> Any:
            is_step = getattr(work, "func", None) is not None and work.func.__name__ == "_step"
            return Done(work()) if is_step else begin(self, lane, work)

        monkeypatch.setattr(WorstOrder, "begin", at_once)
    if what == "before clipped weights are sent":
        monkeypatch.setattr(BlockStream, "complete_step", lambda self, index: None)
    return what


LATE = {
    "all": lambda line: True,
    "copies": lambda line: line.startswith("to"),
    "work on the host": lambda line: not line.startswith("to"),
}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    "what",
    [
        "compute_after",
        "wait",
        "before a buffer is used again",
        "for what is to be added",
        "before a step",
        "before clipped weights are sent",
    ],
)
def test_a_wait_that_is_missing_shows(what: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = "clipped" in what
    how = (4, False, precision, 2, clips, "AdamW", "mean_square", False)
    plain = trained(*how)

    def shows(late: Any, broken: str = "") -> bool:
        transfers = WorstOrder(late, broken)
        try:
            wrong = differs(plain, trained(*how, resident=2, transfers=transfers))
            transfers.check()
        except AssertionError:
            return True
        return wrong

    assert not any(map(shows, LATE.values()))
    broken = forget_to_wait(what, monkeypatch)
    assert any(shows(late, broken) for late in LATE.values())


def test_only_what_is_cast_anyway_travels_cast() -> None:
    model = model_of(3, frozen=True)
    job = Job("j", "x:y", "x:y", "test_transfers:mean_square", hparams=HParams(precision="bf16"))
    objective = Objective(job, model, RANKS.device)
    spilled = Spilled(model, RANKS, 2, None)
    spilled.backward(objective, BATCHES[0], 5, 0.2, True)
    names = [name for name, _ in model[1].named_parameters()]
    narrow = {name for name, is_narrow in zip(names, spilled._stream.narrow[0], strict=True) if is_narrow}
    assert narrow == {"cast.weight", "cast.bias", "base.weight", "base.bias", "both.bias"}
    # Compared in float32, as the guard does, nothing is cast.
    spilled.finish_gradients()
    spilled.backward(objective.exactly(), BATCHES[0], 5, 0.2, True)
    assert {copy.dtype for copy in spilled._stream.fetch(0)} == {torch.float32}
