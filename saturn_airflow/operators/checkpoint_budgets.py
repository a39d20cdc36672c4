"""Keeping checkpoints within their budgets while a sweep trains."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import conf

from saturn_airflow.model import sizes
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.operators.context import home

SETTING = "[saturn] checkpoints_budget"
SWEEP_SETTING = "the sweep's checkpoints_budget"
#: Seconds between looks of one train task: at its sweep's checkpoints, at those of all sweeps.
_SWEEP_EVERY, _ALL_EVERY = 60.0, 300.0
#: For how long a look is waited for; it goes on beside its task.
_PATIENCE_SECONDS = 60.0


def deployments_budget() -> float | None:
    """What the checkpoints of all sweeps may take, in bytes; None for all they want.

    :raises InvalidSweepError: when the setting is no amount.
    """
    value = conf.get("saturn", "checkpoints_budget", fallback="") or ""
    return sizes.bytes_of(value, SETTING) if value.strip() else None


#: A budget in bytes, seconds between looks, and whose checkpoints it is for.
_Budget = tuple[float, float, Callable[[], list[Path]]]


class CheckpointBudgets:
    """The budgets that hold for one sweep: its own, and that of the deployment.

    :param sweep: its folder.
    :param own: its own budget, as the DAG's author wrote it; None where it has none.
    :param tell: called with what was taken away, a line each.
    :param warn: called once with what is more than a budget and may not be taken away.
    """

    def __init__(
        self,
        sweep: Path,
        own: str | None,
        tell: Callable[[str], object],
        warn: Callable[[str], object],
    ) -> None:
        from saturn_airflow.launch import checkpoint_budget

        self._budgets: dict[str, _Budget] = {}
        self._tell, self._warn = tell, warn
        self._looked: dict[str, float] = {}
        self._warned: set[str] = set()
        if own is not None:
            self._budgets[SWEEP_SETTING] = (sizes.bytes_of(own, SWEEP_SETTING), _SWEEP_EVERY, lambda: [sweep])
        try:
            overall = deployments_budget()
        except InvalidSweepError as error:  # training must not suffer from it
            warn(str(error))
            return
        if overall is not None:
            self._budgets[SETTING] = (overall, _ALL_EVERY, lambda: checkpoint_budget.sweeps_of(home()))

    def hear(self, event: Mapping[str, Any]) -> None:
        """Look where a checkpoint was written, and the last look is some time ago."""
        if event["event"] == "checkpoint":
            self.keep()

    def keep(self, *, at_once: bool = False) -> None:
        """Take away what is more than the budgets, unless somebody else is at it.

        :param at_once: even if the last look was just now.
        """
        from saturn_airflow.launch import read_apart

        now = time.monotonic()
        due = {
            name: budget
            for name, budget in self._budgets.items()
            if at_once or now - self._looked.get(name, -math.inf) >= budget[1]
        }
        if not due:
            return
        self._looked |= dict.fromkeys(due, now)
        try:
            # What others wrote may be on a disk that does not answer.
            results = read_apart.within(_PATIENCE_SECONDS, "the disk of some", lambda: _kept_to(due))
        except OSError as error:
            self._warn(f"checkpoints can't be kept within their budget: {error}")
            return
        for name, result in results.items():
            self._report(name, due[name][0], result)

    def _report(self, name: str, most: float, result: Any) -> None:
        for path in result.removed:
            self._tell(f"Removed {path}: {name} is {sizes.shown(most)}")
        if result.over and name not in self._warned:
            self._warned.add(name)
            self._warn(
                f"checkpoints take {sizes.shown(result.bytes)}, and {name} is {sizes.shown(most)}: none of "
                "them may go, for jobs that train keep theirs, and those that have not finished their last; "
                "raise it, keep fewer (keep_checkpoints=1), or train fewer jobs at once"
            )


def _kept_to(budgets: Mapping[str, _Budget]) -> dict[str, Any]:
    """Take away what is more than ``budgets``; by budget what came of it, of none while others are at it."""
    from saturn_airflow.launch import checkpoint_budget

    with checkpoint_budget.alone(home()) as alone:
        if not alone:
            return {}
        return {
            name: checkpoint_budget.keep_to(most, sweeps(), f"{name} is {sizes.shown(most)}")
            for name, (most, _, sweeps) in budgets.items()
        }
