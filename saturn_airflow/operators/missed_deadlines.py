"""Telling people that a sweep misses its deadline."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from airflow.sdk import Context

from saturn_airflow.model import references

_log = logging.getLogger(__name__)


def tell(function: str | None, context: Context, deadline: Mapping[str, Any]) -> None:
    """Call the author's ``on_missed_deadline``; what goes wrong there is logged, and costs no sweep.

    :param function: as ``"module:name"``; None where there is none.
    :param deadline: ``at`` (seconds since the epoch), ``planned``; on the way ``expected`` (when all is
        done), at the end ``met`` and ``late_seconds``.
    """
    if function is None:
        return
    try:
        references.resolve(function)(context, dict(deadline))
    except Exception:
        _log.exception("on_missed_deadline %s failed; the sweep goes on", function)
