"""What an event says at the least, by its kind: whoever reads the events of a run relies on it.

A technique of one's own may report anything, and nothing keeps a job's code from writing into the file that
events are in. What lacks a field would end who reads it: the task, and the sweep's next plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from saturn_airflow.model.plain_numbers import is_number
from saturn_airflow.model.status import Status

#: What a run's supervisor says, and nobody else.
SUPERVISORS = frozenset(
    {"format", "waiting", "leased", "launched", "restarting", "refused", "gave_way", "end"}
)

_Check = Callable[[Any], bool]
_MOST_WHOLE = 2**53


def _is_whole(value: Any) -> bool:
    return is_number(value) and abs(value) <= _MOST_WHOLE and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_any(value: Any) -> bool:
    return True


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


def _are_numbers(value: Any) -> bool:
    return _is_mapping(value) and all(number is None or _is_float(number) for number in value.values())


def _is_float(value: Any) -> bool:
    return is_number(value) and (isinstance(value, float) or abs(value) <= _MOST_WHOLE)


def _are_logged(value: Any) -> bool:
    return _is_list(value) and all(_is_list(m) and len(m) == 4 and _is_text(m[0]) for m in value)


def _is_place(value: Any) -> bool:
    return _is_list(value) and len(value) == 2 and all(map(_is_whole, value))


def _is_status(value: Any) -> bool:
    return value in list(Status)


_NEEDED: dict[str, dict[str, _Check]] = {
    "waiting": {"for": _are_texts},
    "leased": {"devices": _is_list},
    "restarting": {"reason": _is_text},
    "refused": {"technique": _is_text, "devices": _is_whole, "reason": _is_text, "status": _is_status},
    "start": {"step": _is_whole},
    "step": {"step": _is_whole, "epoch": _is_whole, "loss": _is_float, "seconds": _is_float},
    "eval": {"step": _is_whole, "epoch": _is_whole},
    "checkpoint": {"step": _is_whole, "path": _is_text, "seconds": _is_float},
    "warning": {"message": _is_text},
    "guard": {"verdict": _is_text, "seconds": _is_float},
    "looked": {"step": _is_whole, "checked": _is_any},
    "measured": {"parameters": _is_any, "seconds_per_batch": _is_float},
    "broken": {"job": _is_text, "reason": _is_text},
    "end": {"status": _is_status},
}
#: These may be None, or left out.
_OPTIONAL: dict[str, dict[str, _Check]] = {
    "start": {"total_batches": _is_whole, "batches_per_epoch": _is_whole, "checkpoint": _is_text},
    "step": {"lr": _is_float, "samples_per_second": _is_float, "eta_seconds": _is_float},
    "eval": {"eval_loss": _is_float, "metrics": _are_numbers},
    "leased": {"technique": _is_text},
    "refused": {
        "parameters": _is_mapping,
        "version": _is_text,
        "step": _is_whole,
        "seconds": _is_float,
    },
    "gave_way": {"seconds": _is_float},
    "logged": {
        "metrics": _are_logged,
        "params": _is_mapping,
        "tags": _is_mapping,
        "at": _is_place,
        "source": _is_text,
    },
    "end": {"reason": _is_text, "traceback": _is_text, "result": _is_mapping},
}


def lacking(event: Mapping[str, Any]) -> str | None:
    """The first field that ``event`` lacks, or in which it has what is of no use; None for none."""
    kind = event["event"]
    for name, check in _NEEDED.get(kind, {}).items():
        if not check(event.get(name)):
            return name
    for name, check in _OPTIONAL.get(kind, {}).items():
        value = event.get(name)
        if value is not None and not check(value):
            return name
    return None


def has_time(event: Mapping[str, Any]) -> bool:
    """Whether it says when it happened; by a steady clock, too, but for earlier versions."""
    moments: list[Any] = [event.get("time"), event.get("clock", 0.0)]
    return all(_is_float(moment) and math.isfinite(moment) for moment in moments)
