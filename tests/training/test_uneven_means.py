"""A loss in which one device holds means that another does not: refused, before they wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import spec_for
from torch import nn
from torch.nn.functional import l1_loss, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from saturn_airflow import HParams, Job
from saturn_airflow.launch import runs


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(2, 1)


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Of the batches all samples have the marks of a second mean but for two, at one of two devices."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(16, 2, generator=generator)
    marks = torch.ones(16, 1)
    marks[1], marks[8:10] = 0, 0
    return DataLoader(TensorDataset(inputs, torch.cat([inputs.sum(1, keepdim=True), marks], 1)), batch_size=4)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found = mse_loss(outputs, targets[:, :1])
    marked = targets[:, 1] > 0
    return found + l1_loss(outputs[marked], targets[marked, :1]) if marked.any() else found


@pytest.mark.ranks
def test_means_that_one_device_lacks_are_refused(tmp_path: Path) -> None:
    here = "test_uneven_means"
    hparams = HParams(precision="float64", epochs=1)
    job = Job("j", f"{here}:model", f"{here}:data", f"{here}:loss", hparams=hparams)
    found = runs.start(spec_for(tmp_path, job, "ddp", 2, path=(str(Path(__file__).parent),))).wait()
    assert found["status"] == "does_not_fit"
    assert "the loss held 2 means when it was looked at, and now 1" in found["reason"]
