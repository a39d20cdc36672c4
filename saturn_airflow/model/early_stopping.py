"""When a job ends before its last epoch: a metric that no longer becomes better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model.arguments import checked, fields_of
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.metrics import LOSSES


@checked("early_stopping", monitor="metric")
@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End a job whose evaluations no longer become better.

    :param metric: ``"eval_loss"``, ``"epoch_loss"`` or one of the job's own; also ``monitor``.
    :param mode: ``"min"`` or ``"max"``: what is better. Losses are better small.
    :param patience: epochs without anything better after which the job ends, at least 1.
    :param min_delta: how much better counts as better, at least 0.
    """

    metric: str = "eval_loss"
    mode: str | None = None
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        what = "early_stopping"
        if not isinstance(self.metric, str) or not self.metric or self.metric == "loss":
            raise InvalidSweepError(
                f"{what}: metric is {self.metric!r}; it is 'eval_loss', 'epoch_loss' or a metric of the job's"
            )
        if self.mode not in (None, "min", "max"):
            raise InvalidSweepError(f"{what}: mode is {self.mode!r}; it is 'min' or 'max'")
        if self.mode is None and self.metric not in LOSSES:
            raise InvalidSweepError(
                f"{what}: is {self.metric!r} better small or large? Say mode='min' or mode='max'"
            )
        if not isinstance(self.patience, int) or isinstance(self.patience, bool) or self.patience < 1:
            raise InvalidSweepError(
                f"{what}: patience is {self.patience!r}; it must be a whole number of at least 1"
            )
        number = isinstance(self.min_delta, int | float) and not isinstance(self.min_delta, bool)
        if not number or not 0 <= self.min_delta < math.inf:
            raise InvalidSweepError(f"{what}: min_delta is {self.min_delta!r}; it must be at least 0")

    @classmethod
    def of(cls, given: Any) -> EarlyStopping | None:
        """What a job says: one of these, a mapping of its arguments, or None.

        :raises InvalidSweepError: for anything else.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls(**fields_of(cls, given, "early_stopping"))
        raise InvalidSweepError(f"hparams: early_stopping is {given!r:.80}; write EarlyStopping(patience=3)")
