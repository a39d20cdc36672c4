"""What several modules hold is one object in a copy of the model, and in what a checkpoint is read into."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from saturn_airflow.training import model_attributes
from saturn_airflow.training.guarding import whole
from saturn_airflow.training.optim import plain_values


class Holds(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.inside = held, {"also": held}
        self.block = nn.Linear(1, 1)
        self.block.held = held


HELD = {
    "list": ([0.0], lambda held: held.append(1.0)),
    "mapping": ({"n": 0}, lambda held: held.update(n=1)),
    "generator": (random.Random(1), lambda held: held.random()),
    "array": (np.zeros(2), lambda held: held.fill(1.0)),
    "tensor": (torch.zeros(2), lambda held: held.fill_(1.0)),
}


@pytest.mark.parametrize("kind", HELD)
def test_it_is_one_object_in_a_copy_of_a_moment(kind: str) -> None:
    held, change = HELD[kind]
    model = Holds(held)
    copy, given = whole.without_weights(model), model_attributes.plain_attributes(model)
    change(held)  # type: ignore[no-untyped-call]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert copy is not None
    changed = model_attributes.changed(given, model_attributes.plain_attributes(model))
    filled: Any = whole.with_weights(copy, weights, changed)
    assert filled.held is filled.block.held is filled.inside["also"] is not held
    assert plain_values.equal(filled.held, held)


def test_a_tensor_that_is_read_into_is_the_same_tensor() -> None:
    held = torch.zeros(3)
    assert plain_values.restored(held, plain_values.encode(torch.ones(3), "it")) is held
    assert held.tolist() == [1.0] * 3
