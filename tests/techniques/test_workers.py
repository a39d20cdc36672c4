"""Ranks whose data comes from worker processes, however those are started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import odd
import pytest
import torch
from cells import Strategy, job, run
from cells import request as train_request
from plain_training import train_plainly
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from worker_rows import rows

from saturn_airflow.model import references
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.batches import Cut, Position
from saturn_airflow.training.load_data import load_data

STEPS = 3


# How the data are loaded, and under what they are trained on.
LOADERS: dict[str, tuple[dict[str, Any], Strategy]] = {
    "forked": ({"num_workers": 2}, Strategy("ddp", 2)),
    "a stream": ({"stream": True, "num_workers": 2}, Strategy("fsdp", 2)),
    "a stream, persistent, pinned": (
        {"stream": True, "num_workers": 1, "persistent_workers": True, "pin_memory": True},
        Strategy("pipeline", 2),
    ),
    "spawned": (
        {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
        Strategy("ddp", 2),
    ),
    "from a server": ({"num_workers": 1, "multiprocessing_context": "forkserver"}, Strategy("fsdp", 2)),
}


@pytest.mark.ranks
@pytest.mark.timeout(1200)
def test_ranks_get_what_one_device_gets(tmp_path: Path) -> None:
    requests = []
    for name, (settings, strategy) in LOADERS.items():
        a_job = job(
            load_model="odd:chain",
            load_dataloader="worker_rows:rows",
            loss_function="odd:class_loss",
            data_args=settings,
            hparams=HParams(batches=STEPS, precision="float64", lr=1e-2),
        )
        requests.append((train_request(a_job, strategy, tmp_path / name), strategy.devices))
    for (name, (settings, _)), outcome in zip(LOADERS.items(), run(requests), strict=True):
        optimizer = references.load("torch.optim:AdamW")
        losses, weights = train_plainly(odd.chain(), rows(**settings), odd.class_loss, optimizer, STEPS)
        assert outcome.losses == pytest.approx(losses, abs=1e-12), name
        assert (
            max(float((value - weights[key]).abs().max()) for key, value in outcome.weights.items()) < 1e-11
        )


class Filed(Dataset[Any]):
    """Opens a file with its first sample, and tells who has opened it and who reads."""

    def __init__(self) -> None:
        self.opened_by = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.opened_by = self.opened_by or os.getpid()
        return torch.tensor([self.opened_by, os.getpid()])


def filed(wrapped: bool) -> DataLoader[Any]:
    data: Dataset[Any] = Subset(ConcatDataset([Filed(), Filed()]), range(12)) if wrapped else Filed()
    return DataLoader(data, batch_size=4, num_workers=2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_workers_inherit_no_file_that_a_look_at_the_data_opened(wrapped: bool) -> None:
    a_job = Job("a", "m:model", "test_workers:filed", data_args={"wrapped": wrapped})
    data = load_data(a_job, a_job.load_dataloader)
    assert data.first().samples == 4
    assert data.layout
    read = torch.cat([b.micro_batches[0].data for b in data.batches(Position(), Cut(), 2)])
    assert torch.equal(read[:, 0], read[:, 1])
    assert os.getpid() not in read


class Opening(IterableDataset[Any]):
    """Writes a line to a file whenever it is begun; what it counted itself would be put back."""

    def __init__(self, told: str) -> None:
        self.told = told

    def __iter__(self) -> Any:
        with open(self.told, "a") as file:
            file.write("begun\n")
        return iter(torch.arange(24.0).view(12, 2))


def opening(told: str) -> DataLoader[Any]:
    return DataLoader(Opening(told), batch_size=4)


def test_the_beginning_of_a_stream_is_read_once_for_all_that_look_at_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    a_job = Job("a", "m:model", "test_workers:opening", data_args={"told": str(told)}, batch_dim=0)
    data = load_data(a_job, a_job.load_dataloader)
    few = data.few([3, 1, 3])
    looks = [[b.micro_batches[0].data.add_(1) for b in few.batches(Position(), Cut(), 3)] for _ in range(2)]
    assert data.first().samples == 4
    assert told.read_text().split() == ["begun"]
    assert [part.tolist() for part in looks[0]] == [part.tolist() for part in looks[1]], (
        "not what was changed"
    )
    assert len(list(data.batches(Position(), Cut(), 3))) == 3
    assert told.read_text().split() == ["begun"] * 2, "training goes through all of it"
