"""A job's own functions that are told of its steps and epochs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import references
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.ranks import Ranks

Told = Mapping[str, Any]


class Callbacks:
    """The job's ``on_step`` and ``on_epoch``, which the first rank calls.

    :raises JobError: when one can't be loaded.
    """

    def __init__(self, job: Job, ranks: Ranks) -> None:
        self._functions: dict[str, Callable[[Told], object]] = {}
        for name in ("on_step", "on_epoch"):
            reference = getattr(job, name)
            if reference is not None and ranks.is_first:
                with of_the_job(f"{name} {reference!r}"):
                    self._functions[f"{name} {reference!r}"] = references.load(str(reference))

    def on_step(self, told: Told) -> None:
        """After a step.

        :raises JobError: from whatever the job's function raises.
        """
        self._call("on_step ", told)

    def on_epoch(self, told: Told) -> None:
        """After an epoch and its evaluation.

        :raises JobError: as :meth:`on_step`.
        """
        self._call("on_epoch ", told)

    def _call(self, kind: str, told: Told) -> None:
        for what, function in self._functions.items():
            if what.startswith(kind):
                with of_the_job(what):
                    function(copy.deepcopy(dict(told)))
