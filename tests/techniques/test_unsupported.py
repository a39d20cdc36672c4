"""What is refused for what a model is made of, before anything is done to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from saturn_airflow import library
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism import unsupported
from saturn_airflow.training.optim.plain_values import equal_tensors
from saturn_airflow.training.ranks import Ranks


def graph(layout: str) -> nn.Module:
    """A model with an adjacency matrix, as graph networks have."""
    model = nn.Sequential(nn.Linear(2, 2))
    matrix = torch.eye(3)
    kept = {"coo": matrix.to_sparse(), "csr": matrix.to_sparse_csr(), "dense": matrix}
    model[0].register_buffer("adjacency", kept[layout])
    return model


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_buffers_are_for_one_device(layout: str) -> None:
    two = Ranks(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(DoesNotFit, match=r"'0\.adjacency' of the model is a sparse tensor"):
        unsupported.refuse_sparse(graph(layout), two)
    unsupported.refuse_sparse(graph("dense"), two)
    unsupported.refuse_sparse(nn.Sequential(nn.LazyLinear(3)), two)
    unsupported.refuse_sparse(graph(layout), Ranks(rank=0, size=1, device=torch.device("cpu")))


@pytest.mark.parametrize("layout", ["coo", "csr", "dense"])
def test_buffers_of_any_layout_are_compared_between_micro_batches(layout: str) -> None:
    one, other = (graph(layout)[0].adjacency for _ in range(2))  # type: ignore[index]
    assert equal_tensors(one, other)
    assert not equal_tensors(one, other * 2)
    assert equal_tensors(one, torch.eye(3)) is (layout == "dense")


def test_weights_that_are_computed_from_others_are_not_cut() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(2, 2)))
    model.tp_plan = {"0": "colwise"}  # type: ignore[assignment]
    two = Ranks(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(DoesNotFit, match=r"'0' computes its weight from others \(parametrizations\)"):
        library.get("tensor").parallelize(model, two)
