"""How far the estimates of earlier sweeps were off, kept with their runs."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saturn_airflow.model import json_text
from saturn_airflow.model.past_errors import PastError
from saturn_airflow.tracking import sweep_runs

log = logging.getLogger(__name__)

#: A sweep's tag with its errors, as JSON.
ERRORS_TAG = "saturn.errors"
#: Errors of one sweep that are kept, which fit in a tag.
MOST_ERRORS = 250
#: The latest sweeps that are looked at.
_SWEEPS = 40


class SweepErrors(NamedTuple):
    """The errors of a sweep.

    :param fresh: whether most of its estimates were of trials, not of earlier trainings.
    :param asked_in: seconds from its plan until jobs that nobody kept waiting had devices; None if not known.
    """

    sweep: str
    fresh: bool
    errors: tuple[PastError, ...]
    asked_in: float | None = None


def tag(errors: Iterable[PastError], fresh: bool, asked_in: float | None = None) -> dict[str, str]:
    """The tag that keeps the errors of a sweep; none where there are none."""
    kept = list(errors)[:MOST_ERRORS]
    nodes = sorted({error.node for error in kept})
    rows = [
        [nodes.index(error.node), round(math.log(error.factor), 4), round(error.gap, 1)] for error in kept
    ]
    told = {"fresh": fresh, "nodes": nodes, "errors": rows}
    if asked_in is not None:
        told["asked_in"] = round(asked_in, 2)
    return {ERRORS_TAG: json.dumps(told, separators=(",", ":"))} if kept else {}


def find(uri: str, dag_id: str | None = None) -> list[SweepErrors]:
    """The errors of the latest sweeps.

    :param dag_id: only of this DAG's.
    :raises TrackingError: when MLflow does not answer.
    """
    found = []
    for sweep, text in sweep_runs.tagged(uri, ERRORS_TAG, _SWEEPS, dag_id):
        try:
            found.append(_read(sweep, json_text.parse(text)))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError):
            log.warning("the errors of the sweep %s are damaged; they are left out", sweep)
    return found


def _read(sweep: str, told: Mapping[str, Any]) -> SweepErrors:
    errors = tuple(
        PastError(sweep, str(number), _factor(log_factor), str(told["nodes"][node]), max(0.0, float(gap)))
        for number, (node, log_factor, gap) in enumerate(told["errors"])
    )
    asked_in = told.get("asked_in")
    return SweepErrors(sweep, bool(told["fresh"]), errors, None if asked_in is None else _seconds(asked_in))


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is no number of seconds")
    return seconds


def _factor(log_factor: Any) -> float:
    factor = math.exp(float(log_factor))
    if not 0 < factor < math.inf:
        raise ValueError(f"{log_factor!r} is the logarithm of no factor")
    return factor
