"""Noticing that a job's evaluations no longer become better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from saturn_airflow.model.early_stopping import EarlyStopping
from saturn_airflow.model.errors import JobError


class Plateau:
    """What was seen so far of the metric that ends a job.

    :param rule: None for a job that goes on to its end.
    """

    def __init__(self, rule: EarlyStopping | None) -> None:
        self._rule = rule
        self._best: float | None = None
        self._best_epoch = 0
        self._waited = 0
        #: Why the job has ended early, if it has.
        self.reason: str | None = None

    def see(self, epoch: int, values: Mapping[str, float | None]) -> None:
        """Look at what an epoch, from 0, came to.

        :raises JobError: when the metric was not measured.
        """
        if self._rule is None:
            return
        rule, value = self._rule, values.get(self._rule.metric)
        if value is None:
            known = ", ".join(sorted(name for name, known in values.items() if known is not None))
            raise JobError(
                f"early_stopping follows {rule.metric!r}, which was not measured; there is {known}"
            )
        if self._is_better(value):
            self._best, self._best_epoch, self._waited = value, epoch, 0
            return
        self._waited += 1
        if self._waited >= rule.patience:
            best = "never a number" if self._best is None else f"{self._best:.6g} in epoch {self._best_epoch}"
            by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
            self.reason = (
                f"ended early in epoch {epoch}: {rule.metric} was {best}, and not better{by} in "
                f"{self._waited} epoch{'s' if self._waited > 1 else ''} since"
            )

    def _is_better(self, value: float) -> bool:
        assert self._rule is not None
        if not math.isfinite(value):
            return False
        if self._best is None:
            return True
        won = self._best - value if self._rule.mode != "max" else value - self._best
        return won > self._rule.min_delta

    def to_dict(self) -> dict[str, Any]:
        """What was seen, JSON-ready."""
        return {
            "rule": None if self._rule is None else asdict(self._rule),
            "best": self._best,
            "best_epoch": self._best_epoch,
            "waited": self._waited,
            "reason": self.reason,
        }

    def go_on(self, seen: Mapping[str, Any]) -> None:
        """Continue with what :meth:`to_dict` told, unless that was seen by another rule."""
        # Earlier versions did not write the rule.
        if "rule" in seen and seen["rule"] != (None if self._rule is None else asdict(self._rule)):
            return
        self._best, self._best_epoch = seen["best"], seen["best_epoch"]
        self._waited, self.reason = seen["waited"], seen["reason"]
