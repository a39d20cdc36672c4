"""The order in which a loader that shuffles by a generator of its own has its samples."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from saturn_airflow.model.errors import JobError
from saturn_airflow.training import data_state
from saturn_airflow.training.batches import Data, KeepsNothing
from saturn_airflow.training.ranks import Ranks

_WAY_OUT = "what a plain loop draws depends on whose turn it is; give each a generator of its own"


def generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """What the job gave ``loader`` to shuffle by; None where it gave nothing."""
    given = getattr(loader.sampler, "generator", None)
    return None if given is None or given is torch.default_generator else given


def refuse_begun_otherwise(loader: Any, ranks: Ranks) -> None:
    """Check that the generators by which all ranks shuffle begin alike; every rank calls this together.

    :raises JobError: where they do not.
    """
    begin = [g.get_state().numpy().tobytes() for g in _generators(loader) if isinstance(g, torch.Generator)]
    if any(other != begin for other in ranks.everyones(begin)):
        raise JobError(
            "load_dataloader shuffles by a generator that begins otherwise on each device; seed it, as by "
            "torch.Generator().manual_seed(0), or leave it out: the job's seed shuffles then"
        )


def refuse_shared(data: Data, evaluation: Data | None) -> None:
    """Check that evaluation draws by no generator that the data of a job are ordered by.

    :raises JobError: where it does.
    """
    loader, other = (getattr(one, "loader", None) for one in (data, evaluation))
    ordering = {id(generator) for generator in _generators(loader)[1:] if generator is not None}
    if any(id(generator) in ordering for generator in _generators(other)):
        raise JobError(f"load_dataloader and load_eval_dataloader draw by one generator: {_WAY_OUT}")


def refuse_drawn_by(data: Data, generators: Collection[torch.Generator]) -> None:
    """Check that training draws by none of the generators that a job's data draw by.

    :raises JobError: where it does.
    """
    loader = getattr(data, "loader", None)
    kept = [] if isinstance(data, KeepsNothing) else data_state.generators(loader)
    own = {id(generator) for generator in [*_generators(loader), *kept]}
    if any(id(generator) in own for generator in generators):
        raise JobError(f"load_dataloader and what is trained draw by one generator: {_WAY_OUT}")


def _generators(loader: Any) -> list[Any]:
    """The loader's, and those of its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(part, "generator", None) for part in parts)
    return [None if one is torch.default_generator else one for one in found]


class _NoSamples(Dataset[Any]):
    def __len__(self) -> int:
        return 1


class GivenOrder:
    """The order of each epoch, as ``loader`` would draw it from the state that its generator has now."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        generator = generator_of(loader)
        assert generator is not None
        self._given, self._as_given = generator, generator.get_state()
        self._at_first = self._as_given
        self._size = len(loader.dataset)  # type: ignore[arg-type]
        # DataLoader draws a seed for workers by its own generator, which shuffle=True gives the sampler, too.
        self._draws_seeds = loader.generator is generator
        self._draws_once = loader.persistent_workers  # and goes on with the workers of the first epoch
        self._begin()

    def of(self, epoch: int) -> npt.NDArray[np.int64]:
        """The indices of all samples in ``epoch``, from 0.

        :raises JobError: where somebody else has drawn by the loader's generator.
        """
        if not torch.equal(self._given.get_state(), self._as_given):
            raise JobError(
                "something else, such as the model, draws by the generator that load_dataloader shuffles by: "
                f"{_WAY_OUT}"
            )
        if epoch < self._epoch:
            self._begin()
        while self._epoch < epoch:
            self._go_through()
        return self._order

    def kept(self) -> str:
        """The generator's state before the first epoch, as text."""
        return base64.b64encode(self._at_first.numpy().tobytes()).decode()

    def go_on(self, kept: str) -> None:
        """Draw from what :meth:`kept` told."""
        state = np.frombuffer(base64.b64decode(kept), np.uint8).copy()
        self._at_first = torch.from_numpy(state)
        self._begin()

    def _begin(self) -> None:
        self._generator = torch.Generator()
        self._generator.set_state(self._at_first)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def _go_through(self) -> None:
        """Draw the next epoch's order."""
        self._epoch += 1
        if self._draws_seeds and not (self._draws_once and self._epoch):
            iter(DataLoader(_NoSamples(), generator=self._generator))
        # To its end, where it draws once more.
        self._order = np.array(list(RandomSampler(range(self._size), generator=self._generator)))
