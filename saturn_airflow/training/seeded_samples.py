"""Samples fetched by index, each with random numbers of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from saturn_airflow.training import rng


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

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        rng.seed(self._seed, "sample", epoch, index)
        return self._dataset[index]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        samples = [self[key] for key in keys]
        # What is drawn when they are collated, such as masks, follows from which samples they are.
        rng.seed(self._seed, "collate", *itertools.chain.from_iterable(keys))
        return samples
