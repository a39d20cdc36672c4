"""What a job's optimizer takes: as much as it takes in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from saturn_airflow.model.jobs import HParams
from saturn_airflow.parallelism.parallel import Kernels, Parallel
from saturn_airflow.training.optim.optimizers import make_optimizer, parameter_groups
from saturn_airflow.training.ranks import Ranks


def _optimizer(model: nn.Module, **hparams: Any) -> torch.optim.Optimizer:
    chosen = HParams(optimizer="torch.optim:SGD", **hparams)
    alone = Ranks(rank=0, size=1, device=torch.device("cpu"))
    return make_optimizer(chosen, parameter_groups(chosen, model), Parallel(model, alone))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_sparse_gradients(momentum: float) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    before = model.weight.detach().clone()
    optimizer = _optimizer(model, optimizer_args={"momentum": momentum}, lr=1.0)
    model(torch.tensor([2])).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.detach(), before - torch.eye(5)[2][:, None])


def test_sgd_with_momentum_takes_a_gradient_that_comes_late() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    before = model[1].weight.detach().clone()  # type: ignore[operator]
    optimizer = _optimizer(model, optimizer_args={"momentum": 0.9}, lr=1.0)
    for used in ([model[0]], [model[0], model[1]]):
        optimizer.zero_grad()
        sum(part(torch.ones(2)) for part in used).backward()
        optimizer.step()
    assert torch.equal(model[1].weight.detach(), before - 1)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kernels", "fused"),
    [("fused", True), ("fused shards", True), ("many at once", None), ("one by one", None)],
)
def test_adam_updates_all_in_one_kernel_where_it_can(kernels: Kernels, fused: bool | None) -> None:
    model = nn.Linear(2, 1)
    alone = Ranks(rank=0, size=1, device=torch.device("cpu"))
    parallel = Parallel(model, alone, optimizer_kernels=kernels)
    optimizer = make_optimizer(HParams(), parameter_groups(HParams(), model), parallel)
    assert optimizer.defaults["fused"] is fused
