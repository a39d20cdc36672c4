"""Ranks: the processes that train one job together, one per device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What one rank knows of itself and the others. The default process group is there, for one rank too.

    :param rank: this rank's number, from 0.
    :param size: how many ranks there are.
    :param device: this rank's device; already the current one where it is a GPU.
    """

    rank: int
    size: int
    device: torch.device
    _emit: Callable[[dict[str, Any]], None] = field(default=lambda event: None, repr=False)
    _stop_requested: Callable[[], bool] = field(default=lambda: False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def emit(self, event: str, **fields: Any) -> None:
        """Report what happened, JSON-ready: ``emit("step", step=3, loss=0.5)``. Only rank 0 is heard."""
        if self.is_first:
            self._emit({"event": event, **fields})

    def stop_requested(self) -> bool:
        """Whether *this* rank was asked to stop. Asking shows that it is alive: do it once a batch.

        Ranks hear of a stop at different moments: agree with :meth:`any` before acting on it.
        """
        return self._stop_requested()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank; every rank must call this together."""
        if self.size == 1:
            return flag
        agreed = torch.tensor([float(flag)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return bool(agreed.item())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)
