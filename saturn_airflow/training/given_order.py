"""The order in which a loader that shuffles by a generator of its own has its samples."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler


def generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    """What the job gave ``loader`` to shuffle by; None where it gave nothing."""
    given = getattr(loader.sampler, "generator", None)
    return None if given is None or given is torch.default_generator else given


class _Nothing(Dataset[Any]):
    def __len__(self) -> int:
        return 1


class GivenOrder:
    """The order of each epoch, as ``loader`` would draw it from the state that its generator has now."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        generator = generator_of(loader)
        assert generator is not None
        self._at_first = generator.get_state()
        self._size = len(loader.dataset)  # type: ignore[arg-type]
        # DataLoader draws a seed for workers by its own generator, which shuffle=True gives the sampler, too.
        self._draws_seeds = loader.generator is generator
        self._draws_once = loader.persistent_workers  # and goes on with the workers of the first epoch
        self._begin()

    def of(self, epoch: int) -> npt.NDArray[np.int64]:
        """The indices of all samples in ``epoch``, from 0."""
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
            iter(DataLoader(_Nothing(), generator=self._generator))
        # To its end, where it draws once more.
        self._order = np.array(list(RandomSampler(range(self._size), generator=self._generator)))
