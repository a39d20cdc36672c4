"""Workers of a DataLoader see what load_dataloader has made, however the ranks were started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import spec_for
from torch import nn
from torch.utils.data import DataLoader, Dataset

from saturn_airflow import HParams, Job
from saturn_airflow.launch import fork_server, runs

SCALE = 1.0


class Scaled(Dataset[Any]):
    """Samples by a function that can't be pickled, times a global variable that is set as they are loaded."""

    def __init__(self) -> None:
        self.square: Callable[[int], int] = lambda value: value * value

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((1,), self.square(index) * SCALE), torch.zeros(1)


def data(workers: int) -> DataLoader[Any]:
    global SCALE
    SCALE = 3.0
    return DataLoader(Scaled(), batch_size=4, num_workers=workers)


def model() -> nn.Module:
    one = nn.Linear(1, 1, bias=False)
    nn.init.ones_(one.weight)
    return one


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


@pytest.mark.ranks
@pytest.mark.parametrize("warm", [True, False])
def test_workers_see_what_was_loaded(tmp_path: Path, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warm server ranks do not fork; what they start must all the same."""
    if not warm:
        monkeypatch.setattr(fork_server, "start", lambda *_: None)
    here = "test_data_workers"
    job = Job(
        *("j", f"{here}:model", f"{here}:data", f"{here}:loss"),
        data_args={"workers": 1},
        hparams=HParams(batches=1),
    )
    run = runs.start(spec_for(tmp_path, job, path=(str(Path(__file__).parent),)))
    losses = [event["loss"] for event in run.events() if event["event"] == "step"]
    assert losses == [9 * (1 + 16 + 81) / 4], run.end
