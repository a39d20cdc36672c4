"""Samples fetched by index, each with random numbers of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from saturn_airflow.model.errors import JobError
from saturn_airflow.training import data_state, rng


class Keys:
    """A batch sampler that is run through once."""

    def __init__(self, keys: Iterator[list[tuple[int, int]]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._keys


class SeededSamples(Dataset[Any]):
    """A dataset whose random augmentations follow from (seed, epoch, index), not from who fetches when."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._own = data_state.generators(dataset)
        self._as_given = self._own_states()

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        rng.seed(self._seed, "sample", epoch, index)
        return self._dataset[index]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        """The samples of ``keys``, each an epoch and an index.

        :raises JobError: when one draws by a generator of the dataset's own.
        """
        samples = [self[key] for key in keys]
        if self._own_states() != self._as_given:
            raise JobError(
                "the dataset draws some samples, but not the ones that were tried, by a random generator of "
                "its own: a job that is resumed, and each device, would draw others. Draw by the global "
                "generators of torch, numpy or random, which are seeded for each sample; or give the dataset "
                "a method set_epoch(epoch), and it is run through in order"
            )
        # What is drawn when they are collated, such as masks, follows from which samples they are.
        rng.seed(self._seed, "collate", *itertools.chain.from_iterable(keys))
        return samples

    def _own_states(self) -> list[str]:
        """The states of the dataset's own generators, to be compared."""
        return [data_state.summary(generator) for generator in self._own]


class WorkerInit:
    """A ``worker_init_fn`` to whom the worker's dataset is the job's own."""

    def __init__(self, own: Callable[[int], object] | None) -> None:
        self._own = own

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        samples: Any = info.dataset
        object.__setattr__(info, "dataset", samples._dataset)
        if self._own is not None:
            self._own(number)


class SeededOrder(Sampler[int]):
    """The samples of a dataset in the order that their epoch has."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass in the order of ``epoch``, from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(order(len(self), self._seed, self._epoch).tolist())


def order(size: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of ``size`` samples in an epoch."""
    return torch.randperm(size, generator=rng.generator(seed, "order", epoch))
