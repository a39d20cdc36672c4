"""What Saturn adds to Airflow's own metrics (StatsD or OpenTelemetry), as docs/cluster.md lists them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from saturn_airflow.operators import airflow_internals

_log = logging.getLogger(__name__)
#: Milliseconds that a job waited for its devices, once they were its own.
LEASE_WAIT = "saturn.lease_wait"
#: The part of a sweep's device-seconds, from its plan to its last job's end, that jobs had them.
DEVICES_BUSY = "saturn.devices_busy"
#: How many jobs of a sweep were neither finished nor dropped by its selection.
JOBS_FAILED = "saturn.jobs_failed"
#: A sweep's actual over planned seconds, less 1.
PLAN_ERROR = "saturn.plan_error"


class LeaseWait:
    """Tells how long a run waited for its devices, from its events."""

    def __init__(self, tags: Mapping[str, str]) -> None:
        self._tags = tags
        self._asked: Mapping[str, Any] | None = None

    def hear(self, event: Mapping[str, Any]) -> None:
        """Look at the next event."""
        from saturn_airflow.launch import event_file

        if event["event"] == "waiting" and self._asked is None:
            self._asked = event
        elif event["event"] == "leased":
            waited = 0.0 if self._asked is None else event_file.seconds_between(self._asked, event)
            _tell("timing", LEASE_WAIT, 1000 * waited, self._tags)
            self._asked = None


def tell_of_sweep(result: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Tell what came of a sweep.

    :param result: what the report returns.
    """
    _tell("gauge", JOBS_FAILED, float(len(result["failed"])), tags)
    _tell("gauge", DEVICES_BUSY, result["utilisation"], tags)
    if result["planned_seconds"] and result["actual_seconds"]:
        _tell("gauge", PLAN_ERROR, result["actual_seconds"] / result["planned_seconds"] - 1, tags)


def _tell(kind: str, name: str, value: float, tags: Mapping[str, str]) -> None:
    try:
        getattr(airflow_internals.stats(), kind)(name, value, tags=dict(tags))
    except Exception as error:  # numbers for people must cost no job
        _log.warning("Airflow's metrics do not take %s: %s", name, error)
