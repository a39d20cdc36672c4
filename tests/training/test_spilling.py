"""Spilling: few blocks on the device at once, weights never stale, and models larger than memory."""

# Models without types.
# mypy: disable-error-code="index, misc, no-any-return, no-untyped-call, operator, union-attr"

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism import block_stream
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.ranks import launch as launch_ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def deep(width: int = 8, depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 3)
    ).double()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield Ranks(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


def objective(model: nn.Module) -> Objective:
    job = Job("j", "test_spilling:deep", "x:y", "test_spilling:loss", hparams=HParams(precision="float64"))
    return Objective(job, model, torch.device("cpu"))


BATCH = [torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])]


@pytest.mark.parametrize("resident", [2, 3, 99])
def test_at_most_so_many_blocks_are_on_the_device(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, resident: int
) -> None:
    most, fetched = [0], [0]
    start = block_stream.BlockStream._start

    def count(self: Any, index: int, dtypes: Any) -> Any:
        fetched[0] += 1
        started = start(self, index, dtypes)
        most[0] = max(most[0], len(self._on_device) + 1)
        return started

    monkeypatch.setattr(block_stream.BlockStream, "_start", count)
    model = deep()
    spilled = Spilled(model, ranks, resident, None)
    spilled.backward(objective(model), BATCH, 5, 0.2, True)
    assert most[0] <= resident
    # Forward and backward fetch every block once; what is still there is not fetched again.
    assert fetched[0] == 2 * 6 - min(resident, 6)
    spilled.finish_gradients()
    assert not spilled._stream._on_device


@pytest.mark.slow
def test_trains_with_dropout_as_if_not_spilled(ranks: Ranks) -> None:
    model, same = deep(), deep()
    spilled = Spilled(model, ranks, 2, None)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, same)]
    for step in range(4):
        losses = []
        for micro in range(2):
            torch.manual_seed(100 * step + micro)
            total, _ = spilled.backward(objective(model), BATCH, 5, 0.2, micro == 1)
            torch.manual_seed(100 * step + micro)
            expected = loss(same(BATCH[0]), BATCH[1]) * 5
            (expected * 0.2).backward()
            losses.append((total.item(), expected.item()))
        spilled.finish_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert all(one == other for one, other in losses)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_what_cannot_be_spilled_is_refused(ranks: Ranks) -> None:
    with pytest.raises(DoesNotFit, match="no repeated blocks"):
        Spilled(nn.Linear(2, 2), ranks, 2, None)
    same = deep()
    for block in list(same.children())[2:-1]:
        block.linear.weight, block.linear.bias = same[1].linear.weight, same[1].linear.bias
    with pytest.raises(DoesNotFit, match="share all of their weights"):
        Spilled(same, ranks, 2, None)


class Looked(nn.Sequential):
    """Uses its blocks' weights itself, and has a hook around each block."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        for block in list(self)[1:-1]:
            block.register_forward_hook(lambda block, args, output: output * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * sum(p.square().mean() for p in self[2].parameters())


class Table(nn.Module):
    """A block that looks up rows, of which only those get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 8, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rows(torch.tensor([1, 3, 3, 5, 1]))


def gradients(model: nn.Module, spilled: Spilled | None) -> dict[str, torch.Tensor]:
    for micro in range(2):
        torch.manual_seed(micro)
        if spilled is None:
            (loss(model(BATCH[0]), BATCH[1]) * 0.5).backward()
        else:
            spilled.backward(objective(model), BATCH, 5, 0.1, micro == 1)
    if spilled is not None:
        spilled.finish_gradients()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["looked at", "sparse"])
def test_gradients_are_those_of_one_device(ranks: Ranks, kind: str) -> None:
    def make() -> nn.Module:
        if kind == "looked at":
            return Looked(*deep())
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), Table(), Table(), nn.Linear(8, 3)).double()

    model, same = make(), make()
    spilled, expected = gradients(model, Spilled(model, ranks, 2, None)), gradients(same, None)
    assert spilled.keys() == expected.keys()
    for name, gradient in spilled.items():
        assert gradient.layout == expected[name].layout
        torch.testing.assert_close(gradient.to_dense(), expected[name].to_dense(), rtol=0, atol=1e-14)


def test_what_spill_would_leave_out_is_refused(ranks: Ranks) -> None:
    hooked = deep()
    hooked[2].linear.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(DoesNotFit, match=r"parameter '2\.linear\.weight' has a hook on its gradient"):
        Spilled(hooked, ranks, 2, None)


def test_weights_that_are_not_where_they_are_used_are_the_techniques_fault(ranks: Ranks) -> None:
    class Elsewhere(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu")

    model = Elsewhere(*deep())
    with pytest.raises(DoesNotFit, match="something outside of the model's blocks"):
        Spilled(model, ranks, 2, None).backward(objective(model), BATCH, 5, 0.2, True)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def train_under_a_cap(spill: bool, folder: str, ranks: Ranks) -> list[float]:
    """Train 64 MiB of weights with 16 MiB of memory on top of what the process has without them.

    Files that are mapped do not count, as what is in the host's memory does not count on a GPU.
    """
    width = 1024  # 4 MiB of weights in a block
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(16)))
    x = torch.randn(4, width)
    goal = Objective(Job("j", "x:y", "x:y", "test_spilling:mean_square"), model, ranks.device)
    parallel = Spilled(model, ranks, 2, folder) if spill else Parallel(model, ranks)
    optimizer = torch.optim.SGD(model.eval().parameters(), lr=0.01, foreach=False)
    # Neither what any first step sets up nor what malloc keeps for later is what is measured.
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: large tensors go back to the system at once
    two_blocks = nn.Sequential(Block(width), Block(width))
    Spilled(two_blocks, ranks, 2, folder).backward(goal, [x, x], 4, 0.25, True)
    del two_blocks
    gc.collect()
    status = Path("/proc/self/status").read_text()
    used = int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + 16 * 2**20, resource.RLIM_INFINITY))
    losses = []
    for _ in range(3):
        total, over = parallel.backward(goal, [x, x * 0.5], 4, 0.25, True)
        parallel.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / over).item())
    return losses


@pytest.mark.ranks
def test_trains_four_times_what_fits_in_memory(tmp_path: Path) -> None:
    (losses,) = launch_ranks(train_under_a_cap, True, str(tmp_path), size=1)
    assert losses[-1] < losses[0]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RanksFailedError) as failed:
        launch_ranks(train_under_a_cap, False, str(tmp_path), size=1)
    assert failed.value.failure.status == "out_of_memory"
