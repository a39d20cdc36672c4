"""A job that sleeps a tenth of a second per batch; its result depends on all that a checkpoint holds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PACE = float(os.environ.get("SOAK_PACE", "0.1"))


class _Slow(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        time.sleep(PACE / 8)
        return super().__getitem__(index)  # type: ignore[no-untyped-call]


def points(batch_size: int) -> DataLoader[Any]:
    """Random points, in an order that depends on the job's seed."""
    inputs = torch.randn(1024, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(_Slow(inputs, (inputs[:, 0] > 0).long()), batch_size=batch_size, shuffle=True)


def told(context: Any, deadline: dict[str, Any]) -> None:
    """Write down what is told of a missed deadline."""
    file = Path(os.environ["AIRFLOW__SATURN__HOME"]) / f"told-{context['run_id']}.jsonl"
    with file.open("a") as out:
        out.write(json.dumps({"time": time.time(), **deadline}) + "\n")


def linear() -> nn.Module:
    """With dropout, which draws random numbers in each step."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy."""
    return nn.functional.cross_entropy(outputs, targets)
