"""Numbers and random generators that a stream of data keeps, such as the epoch by which it shuffles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from saturn_airflow.training.optim import own_classes, plain_values


class Counters:
    """Those of ``loader``, an iterable of batches, and of the dataset it may have."""

    def __init__(self, loader: Any) -> None:
        is_torchs = isinstance(loader, DataLoader)
        objects = [loader.dataset] if is_torchs else [loader]
        self._objects = [one for one in objects if own_classes.fields_of(one) is not None]

    def values(self) -> list[dict[str, Any]]:
        """As they are now, JSON-ready."""
        return [
            {name: plain_values.encode(value, name) for name, value in vars(one).items() if _is_kept(value)}
            for one in self._objects
            if hasattr(one, "__dict__")
        ]

    def set(self, values: Any) -> None:
        """Continue with what :meth:`values` told; None where nothing is known."""
        for one, own in zip(self._objects, values or (), strict=False):
            for name, value in own.items():
                object.__setattr__(one, name, plain_values.restored(vars(one).get(name), value))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What is counted inside is not counted."""
        values = self.values()
        try:
            yield
        finally:
            self.set(values)


def _is_kept(value: Any) -> bool:
    return plain_values.is_scalar(value) and not isinstance(value, np.ndarray | bytes | bytearray)
