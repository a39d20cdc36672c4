"""Batches: the same samples in the same order, however many share them and wherever training resumes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import batches
from saturn_airflow.training.batches import Cut, GlobalBatch, Position
from saturn_airflow.training.layout import of_batch
from saturn_airflow.training.load_data import load_data


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor(index)


class Augmented(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class Endless(IterableDataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(i) for i in range(self.size))


def numbers(size: int = 10, batch_size: int = 4, shuffle: bool = True, drop_last: bool = False) -> Any:
    return DataLoader(Numbers(size), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)


def without_batch_size(size: int = 10) -> Any:
    return DataLoader(Numbers(size), batch_size=3)


def augmented(num_workers: int = 0) -> Any:
    return DataLoader(Augmented(10), batch_size=4, shuffle=True, num_workers=num_workers)


def weighted() -> Any:
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0, 4.0, 5.0], num_samples=11)
    return DataLoader(Numbers(5), batch_size=4, sampler=sampler)


class Evens(RandomSampler):
    """Goes by the name of an order that it does not have."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


def derived() -> Any:
    return DataLoader(Numbers(10), batch_size=4, sampler=Evens(Numbers(10)))


def iterable_dataset() -> Any:
    return DataLoader(Endless(10), batch_size=4)


def one_generator() -> Any:
    return ({"x": torch.arange(n), "name": "same for all"} for n in (4, 4, 2))


def a_list() -> Any:
    return [torch.arange(4), torch.arange(4), torch.arange(2)]


def distributed() -> Any:
    return DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=0))


def iterable_of(batch_size: int) -> Any:
    return DataLoader(Endless(10), batch_size=batch_size)


def nothing() -> Any:
    return DataLoader(Numbers(0), batch_size=4)


def no_batches() -> Any:
    return iter(())


def no_tensors() -> Any:
    return [["text"]]


def a_number() -> Any:
    return 7


def no_mapping() -> Any:
    raise RuntimeError("the disk is gone")


def load(loader: str, seed: int = 0, batch_size: int | None = None, **data_args: Any) -> batches.Data:
    hparams = HParams(seed=seed, batch_size=batch_size)
    job = Job("j", "x:y", f"test_batches:{loader}", hparams=hparams, data_args=data_args)
    return load_data(job, job.load_dataloader)


def samples(batch: GlobalBatch) -> list[int]:
    """What counts of a batch of numbers."""
    return [int(n) for data, count in batch.micro_batches for n in list(data)[:count]]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 23),
    batch_size=st.integers(1, 9),
    shares=st.integers(1, 5),
    accumulate=st.integers(1, 5),
    start=st.integers(0, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_shares_and_micro_batches_make_up_the_batch(
    size: int, batch_size: int, shares: int, accumulate: int, start: int, shuffle: bool, drop_last: bool
) -> None:
    if drop_last and size < batch_size:
        size = batch_size
    data = load("numbers", size=size, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    assert data.batches_per_epoch
    limit = 2 * data.batches_per_epoch
    whole = list(data.batches(Position(), Cut(), start + limit))
    position = Position(*divmod(start, data.batches_per_epoch))
    cuts = [list(data.batches(position, Cut(accumulate, s, shares), limit)) for s in range(shares)]
    for number, expected in enumerate(whole[start:]):
        parts = [cut[number] for cut in cuts]
        assert all(part.position == expected.position for part in parts)
        assert all(part.samples == expected.samples for part in parts)
        assert len({len(part.micro_batches) for part in parts}) == 1
        # Micro-batch by micro-batch, share by share, they are the batch in its order.
        joined = [
            int(n)
            for micro in zip(*(part.micro_batches for part in parts), strict=True)
            for data_, count in micro
            for n in list(data_)[:count]
        ]
        assert joined == samples(expected)
        assert all(len(micro.data) for part in parts for micro in part.micro_batches)
    epoch = [n for batch in whole[: data.batches_per_epoch] for n in samples(batch)]
    assert len(set(epoch)) == len(epoch) == (size - size % batch_size if drop_last else size)


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [n for b in load("numbers", seed).batches(Position(epoch), Cut(), 3) for n in samples(b)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert order(1, 2) == order(1, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentations_do_not_depend_on_workers_shares_or_where_one_starts(workers: int) -> None:
    whole = list(load("augmented").batches(Position(), Cut(), 6))
    torch.rand(7)
    data = load("augmented", num_workers=workers)
    for share in range(2):
        parts = data.batches(Position(0, 2), Cut(1, share, 2), 4)
        for expected, part in zip(whole[2:], parts, strict=True):
            row = {int(r[0]): r for r in expected.micro_batches[0].data}
            for got in part.micro_batches[0].data:
                assert torch.equal(got, row[int(got[0])])


@pytest.mark.parametrize("loader", ["weighted", "iterable_dataset", "one_generator", "a_list"])
def test_streams_are_shared_and_resumed(loader: str) -> None:
    def column(data: Any) -> Any:
        return data["x"] if isinstance(data, dict) else data

    whole = list(load(loader).batches(Position(), Cut(), 6))
    assert [batch.position for batch in whole] == [Position(e, b) for e in (0, 1) for b in (0, 1, 2)]
    assert [batch.ends_epoch for batch in whole] == [False, False, True] * 2
    for start in (1, 3, 4):
        torch.rand(3)
        position = Position(*divmod(start, 3))
        shares = [list(load(loader).batches(position, Cut(2, s, 3), 6 - start)) for s in range(3)]
        for expected, *parts in zip(whole[start:], *shares, strict=True):
            joined = [
                int(n)
                for micro in zip(*(part.micro_batches for part in parts), strict=True)
                for data, count in micro
                for n in column(data)[:count]
            ]
            assert joined == [int(n) for n in column(expected.micro_batches[0].data)]


def test_a_sampler_that_derives_from_a_shuffling_one_is_asked_for_its_order() -> None:
    given = load("derived").batches(Position(), Cut(), 2)
    assert [int(n) for batch in given for n in batch.micro_batches[0].data] == [0, 2, 4, 6, 8]


def test_batch_size_of_the_job_is_the_global_one() -> None:
    assert load("numbers", batch_size=5).batches_per_epoch == 2
    assert load("without_batch_size", batch_size=5).batches_per_epoch == 2
    assert load("without_batch_size").batches_per_epoch == 4


def test_pairs_of_tensors_are_taken_apart() -> None:
    x, y = next(iter(DataLoader(TensorDataset(torch.arange(5), torch.arange(5) * 2), batch_size=5)))
    data, count = of_batch([x, y], None).take([x, y], 5, range(1, 3))
    assert count == 2
    assert [t.tolist() for t in data] == [[1, 2], [2, 4]]


@pytest.mark.parametrize(
    ("loader", "data_args", "says"),
    [
        ("nothing", {}, "the dataset is empty; a job needs at least one batch"),
        (
            "numbers",
            {"size": 3, "drop_last": True},
            "3 samples are fewer than one batch of 4, which drop_last drops; lower batch_size",
        ),
        ("distributed", {}, "uses a DistributedSampler; leave it out, Saturn shares the batches itself"),
        ("a_number", {}, "returned a int; return a DataLoader or an iterable of batches"),
        ("no_batches", {}, "the data is empty; a job needs at least one batch"),
        ("no_tensors", {}, "a batch holds no tensor"),
        ("no_mapping", {}, "raised RuntimeError: the disk is gone"),
    ],
)
def test_bad_data_is_named(loader: str, data_args: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        next(itertools.chain(load(loader, **data_args).batches(Position(), Cut(), 1)))


@given(
    size=st.integers(1, 200),
    batch_size=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    shuffle=st.booleans(),
)
def test_a_few_samples_come_from_all_over_the_data(
    size: int, batch_size: int, sizes: list[int], shuffle: bool
) -> None:
    few = load("numbers", size=size, batch_size=batch_size, shuffle=shuffle).few(sizes)

    def take() -> list[list[int]]:
        taken = few.batches(Position(), Cut(), len(sizes))
        return [batch.micro_batches[0].data.tolist() for batch in taken]

    found = take()
    assert found == take()
    wanted = [min(one, batch_size, size) for one in sizes]
    assert [len(batch) for batch in found] == wanted
    assert all(len(set(batch)) == len(batch) for batch in found)
    if sum(min(one, batch_size) for one in sizes) > size:
        return
    picked = sorted(itertools.chain(*found))
    assert len(set(picked)) == len(picked)
    if not shuffle:
        edges = [0, *picked, size]
        assert max(b - a for a, b in itertools.pairwise(edges)) <= size / len(picked) + 1


@pytest.mark.parametrize("loader", ["weighted", "derived", "iterable_dataset", "one_generator", "a_list"])
def test_a_batch_size_that_changes_nothing_is_refused(loader: str) -> None:
    """A grid over it would train the same job again and again."""
    with pytest.raises(JobError, match=r"batch_size is 8, which changes nothing: .* of 4 samples; let the"):
        load(loader, batch_size=8)
    assert load(loader, batch_size=4).first().samples == 4


def test_a_batch_size_that_data_args_overrule_is_refused() -> None:
    job = Job(
        *("j", "x:y", "test_batches:iterable_of"),
        hparams=HParams(batch_size=8),
        data_args={"batch_size": 4},
    )
    with pytest.raises(JobError, match="batch_size is 8, which changes nothing"):
        load_data(job, job.load_dataloader)


def test_a_batch_size_that_is_taken_is_no_mistake() -> None:
    assert load("iterable_of", batch_size=3).first().samples == 3
    assert load("without_batch_size", batch_size=8).first().samples == 8
