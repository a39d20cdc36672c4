"""Batches in memory that a loader writes into again: none is asked for before the one before it is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import pinned_batches, precision
from saturn_airflow.training.batches import Cut, Position
from saturn_airflow.training.load_data import load_data

BUFFER = torch.zeros(2)


def into_the_buffer(samples: list[int]) -> torch.Tensor:
    return BUFFER.copy_(torch.tensor(samples))


class Run(list[int]):
    """Numbers that can only be run through."""

    def __iter__(self) -> Iterator[Any]:
        return (into_the_buffer([number, number + 1]) for number in (0, 2, 4))


def loader(kind: str) -> Any:
    if kind == "run through":
        return Run([0, 2, 4])
    return DataLoader(range(6), batch_size=2, collate_fn=into_the_buffer)  # type: ignore[arg-type]


class Copies:
    """Copies that are done as late as they may be: when somebody waits for them."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, source: torch.Tensor) -> torch.Tensor:
        self.asked.append((torch.full_like(source, torch.nan), source))
        return self.asked[-1][0]

    def wait(self) -> None:
        for target, source in self.asked:
            target.copy_(source)
        self.asked.clear()


@pytest.mark.parametrize("cut", [Cut(), Cut(accumulate=2)], ids=["whole", "in two"])
@pytest.mark.parametrize("kind", ["fetched by index", "run through"])
def test_a_batch_is_copied_before_the_next_is_asked_for(
    kind: str, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("j", "x:y", "test_pinned_batches:loader", data_args={"kind": kind}, hparams=HParams(epochs=1))
    copies = Copies()
    monkeypatch.setattr(pinned_batches, "wait", copies.wait)
    batches = load_data(job, job.load_dataloader).batches(Position(), cut, 3)
    got = [copies.begin(part.data) for batch in batches for part in batch.micro_batches]
    copies.wait()
    assert torch.cat(got).tolist() == [0, 1, 2, 3, 4, 5]


class Event:
    """An event of a GPU, of which it is noted what becomes of it."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def record(self, stream: str) -> None:
        self._said.append(f"recorded in {stream}")

    def synchronize(self) -> None:
        self._said.append("waited")


def test_copies_from_pinned_memory_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    pinned = torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is pinned)
    gpu = torch.device("cuda", 0)
    pinned_batches.note([torch.ones(1)], gpu)  # a copy from other memory holds the host up by itself
    pinned_batches.note({"x": pinned}, torch.device("cpu"))
    pinned_batches.wait()
    assert said == []
    pinned_batches.note({"x": [torch.ones(1), pinned]}, gpu)
    for _ in range(2):
        pinned_batches.wait()
    assert said == ["recorded in the stream", "waited"]


def test_each_batch_that_is_placed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(pinned_batches, "note", lambda *given: noted.append(given))
    batch, cpu = {"x": torch.zeros(3)}, torch.device("cpu")
    precision.place(batch, cpu, "float32")
    assert noted == [(batch, cpu)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        torch.ones(2, device="meta"),
    ],
    ids=["sparse", "in rows", "nested", "jagged", "elsewhere"],
)
def test_whether_a_tensor_is_pinned_can_be_asked_of_all(tensor: torch.Tensor) -> None:
    assert not tensor.is_pinned()
