"""The random numbers that data draw where a ``Trainer`` fetches them: a batch ahead of the steps it takes.

When a step is saved, the batch after it has been fetched already, with random numbers from before the step. A
Trainer that is resumed fetches it anew; here with the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler
from transformers import Trainer

from saturn_airflow.training.optim import plain_values

States = tuple[Any, Any, Any]


def states() -> States:
    """Where torch's generator on the CPU, numpy's and Python's are."""
    return torch.random.get_rng_state(), np.random.get_state(), random.getstate()


def set_states(given: States) -> None:
    """Have the generators be where they were."""
    torch.random.set_rng_state(given[0])
    np.random.set_state(given[1])
    random.setstate(given[2])


def can_be_followed(loader: Any) -> bool:
    """Whether batches of ``loader`` are made in this process, one after another."""
    return loader.num_workers == 0 and type(loader.batch_sampler) is BatchSampler


class FetchRandomness:
    """Notes the random numbers before each batch of a trainer's data, and sets them for one that is resumed.

    :param trainer: before it trains.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._latest: tuple[int, States] | None = None
        self._wanted: Mapping[str, Any] | None = None
        self._checkpoint = ""
        make = trainer.get_train_dataloader

        def get_train_dataloader() -> Any:
            loader: Any = make()
            if can_be_followed(loader):
                loader.batch_sampler.__class__ = _followed(self._before_fetch)
            return loader

        trainer.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]

    def value(self) -> dict[str, Any] | None:
        """Which batch of its epoch was fetched last, and with what, JSON-ready."""
        if self._latest is None:
            return None
        batch, then = self._latest
        return {"batch": batch, "states": plain_values.encode(then, "the generators' states")}

    def go_on(self, kept: Mapping[str, Any] | None, checkpoint: Path, *, within_epoch: bool) -> None:
        """Have training, which begins now, go on with the random numbers of ``checkpoint``.

        :param kept: what :meth:`value` told there.
        """
        if within_epoch and kept is None:
            return  # data draw nothing, so that the trainer may load them once it has fetched a batch
        self._wanted, self._checkpoint = kept, str(checkpoint)
        load = self._trainer._load_rng_state

        def pass_over(checkpoint: str) -> None:
            """Load nothing, once: what is there has moved on since."""
            self._trainer._load_rng_state = load

        if not within_epoch:  # callbacks that hear of an epoch's begin may draw
            load(self._checkpoint)
        self._load, self._trainer._load_rng_state = load, pass_over

    def _before_fetch(self, batch: int) -> None:
        if self._wanted is not None and batch == self._wanted["batch"]:
            set_states(plain_values.decode(self._wanted["states"]))
        elif self._wanted is not None and batch > self._wanted["batch"]:
            self._wanted = None
            self._load(self._checkpoint)
        self._latest = batch, states()


def _followed(before: Callable[[int], None]) -> type[BatchSampler]:
    """The class of a batch sampler that says of each batch, by its number, that it is about to be fetched."""

    class FollowedBatchSampler(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            number = -1
            for number, batch in enumerate(super().__iter__()):
                before(number)
                yield batch
            before(number + 1)

    return FollowedBatchSampler
