"""The pieces that a pipeline cuts a batch into are cut on the device, of what was copied there at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.pipelines import Pipelined
from saturn_airflow.training import precision
from saturn_airflow.training.layout import of_batch
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def test_a_batch_goes_to_the_device_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
    batch = [torch.randn(5, 4), torch.randn(5, 6)]
    mean_square(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    placed: list[Any] = []
    place = precision.place

    def noted(data: Any, *where: Any) -> Any:
        placed.append(data)
        return place(data, *where)

    monkeypatch.setattr(precision, "place", noted)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
        data: Any = SimpleNamespace(layout=of_batch(batch, None))
        objective = Objective(Job("j", "x:y", "x:y", "test_pieces:mean_square"), model, ranks.device).of(data)
        parallel = Pipelined(model, ranks, 2, "1f1b")
        objective.begin(5)
        parallel.prepare(objective, batch, 5)
        placed.clear()
        _, over = parallel.backward(objective, batch, 5, 1 / 5, True)
    finally:
        dist.destroy_process_group()
    # The very batch: the one that is copied ahead is known by it.
    assert [data is batch for data in placed] == [True]
    assert over == 5
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
