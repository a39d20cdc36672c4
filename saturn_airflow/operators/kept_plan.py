"""A plan that stands: who clears its task alone has it handed on again, not made anew.

The tasks that train by it were not cleared, and go on. By another plan their next tries would train other
jobs, and the report would take none of their outcomes.
"""

from __future__ import annotations

import contextlib
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import Context

from saturn_airflow.model import formats
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.shared_clock import ahead_of
from saturn_airflow.operators.standing import any_stands
from saturn_airflow.operators.xcom_parts import ListingOperator

WHAT = "a kept plan"
_RETURNED = "return_value"


class KeptPlanOperator(ListingOperator):
    """A task that plans, unless the tasks that train by its plan were not cleared with it.

    :param number: of the round, from 1.
    """

    def __init__(
        self, *, settings: SweepSettings, number: int = 1, on_success_callback: Any = None, **kwargs: Any
    ) -> None:
        theirs = on_success_callback or []
        theirs = theirs if isinstance(theirs, Sequence) else [theirs]
        super().__init__(on_success_callback=[_send_records, *theirs], **kwargs)
        self.settings = settings
        self.number = number
        self.mlflow_url: str | None = None
        #: The mapped tasks that train by this plan, once the graph has them.
        self.train_tasks: Sequence[str] = ()
        self._handed_on: dict[str, Any] = {}
        #: Sends what MLflow is to know of the plan, once Airflow knows it: jobs begin meanwhile.
        self.send_records: Callable[[], object] | None = None

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """The plan's entries, in the order of their start."""
        folder = SweepContext.of(context, self.settings.group).folder
        if (kept := self._standing(context, folder)) is not None:
            self.log.warning(
                "The plan stays as it is: tasks that train by it were not cleared. To plan anew, clear this "
                "task with all that is downstream of it"
            )
            self.mlflow_url = kept.get("mlflow_url")
            for key, value in kept["handed_on"].items():
                context["ti"].xcom_push(key, value)
            return list(kept[_RETURNED])
        ahead = ahead_of(folder)
        returned = [{**entry, "ahead": ahead} for entry in self.plan(context)]
        kept = {"handed_on": self._handed_on, _RETURNED: returned, "mlflow_url": self.mlflow_url}
        with contextlib.suppress(OSError):  # a full disk keeps no plan from being carried out
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(folder), json.dumps({**formats.stamp(WHAT), **kept}))
        return returned

    @abstractmethod
    def plan(self, context: Context) -> list[dict[str, Any]]:
        """Plan; the plan's entries, in the order of their start."""

    def hand_on(self, context: Context, key: str, value: Any) -> None:
        """Push what other tasks are to know of the plan."""
        self._handed_on[key] = value
        context["ti"].xcom_push(key, value)

    def _standing(self, context: Context, folder: Path) -> dict[str, Any] | None:
        """What this task handed on before, where tasks downstream of it stand.

        :raises NewerFormatError: when a newer version noted it in a way that this one can't read.
        """
        path, ti = self._file(folder), context["ti"]
        try:
            kept = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        if not (isinstance(kept, dict) and {"handed_on", _RETURNED} <= set(kept)):
            return None
        if not any_stands(ti, {*self.train_tasks, *self.downstream_task_ids}):
            return None
        formats.check(kept, WHAT, path)
        return kept

    def _file(self, folder: Path) -> Path:
        return folder / f"round_{self.number}.plan"


def _send_records(context: Context) -> None:
    # The task that ran is a copy of the one that this was given to.
    ran = context["task"]
    assert isinstance(ran, KeptPlanOperator), "no other is given this"
    if ran.send_records is not None:
        ran.send_records()
