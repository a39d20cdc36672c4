"""Attributes of modules that list weights are no state of the modules."""

from __future__ import annotations

import math

import torch
from torch import nn

from saturn_airflow.training.model_attributes import ModelAttributes, put
from saturn_airflow.training.optim import plain_values

CPU = torch.device("cpu")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 2)


def stand_ins(model: Recurrent) -> list[torch.Tensor]:
    return [torch.full_like(weight, math.nan).detach() for weight in model.cell.parameters()]


def test_stand_ins_of_weights_are_not_kept() -> None:
    model = Recurrent()
    model.cell._flat_weights = stand_ins(model)  # type: ignore[assignment]
    assert ModelAttributes(model, CPU).values() == ({}, {})


def test_stand_ins_that_a_checkpoint_has_leave_the_weights_as_they_are() -> None:
    model = Recurrent()
    put(model, {"cell": {"_flat_weights": plain_values.encode(stand_ins(model), "it")}}, CPU)
    assert all(map(torch.equal, model.cell._flat_weights, model.cell.parameters()))  # type: ignore[arg-type]
