"""Blocks that are computed twice train as if they were computed once: exactly, or they are refused.

The truth is a loop of plain PyTorch, which keeps all activations.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from blocks_with_state import LAYERS, REFUSED, SWITCHES, GoesThroughTwice, model, switch_elsewhere
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.blocks import recompute_blocks
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.recomputation import recomputed
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.slow

STEPS, MICRO_BATCHES = 3, 2
X = torch.randn(STEPS, MICRO_BATCHES, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(5) % 3
HOW = ["recompute", "spill"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield Ranks(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


def seed(*position: int) -> None:
    number = hash(position) % 2**32
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def truth(model: nn.Module) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Losses, weights and buffers, and outputs of the evaluated model: plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            seed(step, micro)
            total = nn.functional.cross_entropy(model(X[step, micro]), Y)
            torch.autograd.backward(total / MICRO_BATCHES)
            losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), model.eval()(X[0, 0])


def trained(
    model: nn.Module, how: str, ranks: Ranks
) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """The same, with blocks that are computed twice."""
    job = Job("j", "x:y", "x:y", "blocks_with_state:loss", hparams=HParams(precision="float64"))
    goal = Objective(job, model, ranks.device)
    if how == "spill":
        parallel: Parallel = Spilled(model, ranks, 2, None)
    else:
        recompute_blocks(model)
        parallel = Parallel(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            seed(step, micro)
            total, over = parallel.backward(goal, [X[step, micro], Y], 5, 0.2 / MICRO_BATCHES, micro == 1)
            losses.append((total / over).item())
        parallel.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), model.eval()(X[0, 0])


def assert_same(one: Any, other: Any) -> None:
    (losses, state, outputs), (other_losses, other_state, other_outputs) = one, other
    assert losses == pytest.approx(other_losses, abs=1e-12)
    assert state.keys() == other_state.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, other_state[name], rtol=1e-11, atol=1e-11, msg=name)
    torch.testing.assert_close(outputs, other_outputs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_trains_as_if_computed_once(ranks: Ranks, name: str, how: str) -> None:
    names = ["linear", name]
    assert_same(trained(model(names), how, ranks), truth(model(names)))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(ranks: Ranks, name: str, how: str) -> None:
    with pytest.raises(DoesNotFit, match=REFUSED[name][1]) as refused:
        trained(model([name, "linear"]), how, ranks)
    assert "block '1'" in str(refused.value)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_switched_between_two_passes_is_as_it_was(ranks: Ranks, name: str, how: str) -> None:
    torch.manual_seed(0)
    switching = GoesThroughTwice(SWITCHES[name]).double()
    assert_same(trained(copy.deepcopy(switching), how, ranks), truth(switching))


@pytest.mark.parametrize("how", HOW)
def test_what_is_switched_elsewhere_is_refused(ranks: Ranks, how: str) -> None:
    with pytest.raises(DoesNotFit, match="what it reads outside of itself has changed"):
        trained(GoesThroughTwice(switch_elsewhere).double(), how, ranks)


@pytest.mark.parametrize("then", [0, 2])
def test_what_returns_more_or_less_by_the_backward_pass_is_refused(then: int) -> None:
    noted = [1]
    block = nn.Linear(4, 4)

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        y = nn.functional.linear(x, block.weight)
        return [y, *(y.detach() for _ in range(noted[0]))]

    result = recomputed("block", block, forward)(X[0, 0].float())
    noted[0] = then
    with pytest.raises(DoesNotFit, match="what it reads outside of itself has changed"):
        result[0].sum().backward()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    depth=st.integers(2, 4),
    frozen=st.booleans(),
    how=st.sampled_from(HOW),
)
def test_random_models_train_as_if_computed_once(
    ranks: Ranks, names: list[str], depth: int, frozen: bool, how: str
) -> None:
    made = [model([*names, "linear"], depth, frozen) for _ in range(2)]
    assert_same(trained(made[0], how, ranks), truth(made[1]))
