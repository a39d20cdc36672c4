"""What changes a ``Trainer``'s data otherwise than by being told of the epoch, as in a resume."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import Trainer

from saturn_airflow.training.trainers import seen_state


class DataChanges:
    """Looks at the data and the samplers of ``trainer``.

    :param loader: what training fetches its batches from, before the first one.
    :param epoch: that training begins within, of which data and samplers are then told; None at one's begin.
    :param counted: what samplers change as they give their indices, by its name.
    """

    def __init__(
        self, trainer: Trainer, loader: Any, epoch: int | None = None, counted: Collection[str] = ()
    ) -> None:
        self._trainer, self._loader, self._counted = trainer, loader, counted
        self._tell = getattr(loader, "set_epoch", None)
        self._names: set[str] = set()
        if epoch is not None and self._tell is not None:
            self._tell(epoch)
        self._told, self._untold = self._seen()
        if self._tell is not None:
            loader.set_epoch = self._set_epoch

    def names(self) -> list[str]:
        """What has changed, by where it is."""
        told, untold = self._seen()
        self._names.update(seen_state.differing(self._told, told))
        return sorted({*self._names, *seen_state.differing(self._untold, untold)} - {*self._counted})

    def _set_epoch(self, epoch: int) -> None:
        self.names()
        assert self._tell is not None
        self._tell(epoch)
        self._told, _ = self._seen()

    def _seen(self) -> tuple[seen_state.Seen, seen_state.Seen]:
        """What is told of epochs, and what is not."""
        data = {name: getattr(self._trainer, name) for name in ("train_dataset", "eval_dataset")}
        roots = {**data, "data_collator": self._trainer.data_collator}
        roots |= {"the loader's dataset": self._loader.dataset, **seen_state.samplers_of(self._loader)}
        heard = [*seen_state.samplers_of(self._loader).values(), self._loader.dataset]
        heard = [part for part in heard if self._tell is not None and hasattr(part, "set_epoch")]
        told = {n: root for n, root in roots.items() if any(root is part for part in heard)}
        untold = {n: root for n, root in roots.items() if n not in told}
        return seen_state.of_parts(told, self._trainer), seen_state.of_parts(untold, self._trainer, heard)
