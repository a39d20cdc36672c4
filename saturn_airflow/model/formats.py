"""The formats of what outlives one version of this package: files, and what Airflow tasks hand to each other.

Each has a number, which grows only when an older reader would misread what is written now. What has no number
is of format 1. Readers ignore fields they do not know; a newer format they refuse, and leave it as it is.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from saturn_airflow.model.errors import SaturnError

#: The newest format of each thing that this version reads, and the one it writes.
FORMATS = {
    "a checkpoint": 3,
    "a run's spec": 2,
    "a run's events": 1,
    "an outbox": 2,
    "a trial": 1,
    "an estimate": 1,
    "an entry of a plan": 1,
    "a plan": 1,
    "a kept plan": 1,
    "a note of listed trials": 1,
    "an outcome": 1,
    "progress": 1,
    "a wish": 1,
    "a drain": 1,
    "a shared cluster": 1,
    "a claim": 1,
    "what teams used of a node's devices": 1,
    "a node's memory": 1,
    "an active sweep": 1,
    "a file of arrivals": 1,
}
FORMAT, WRITTEN_BY = "format", "written_by"


class NewerFormatError(SaturnError):
    """Something was written by a newer version, in a format that this one can't read."""


def stamp(what: str) -> dict[str, Any]:
    """What says which format something is written in, and by which version."""
    return {FORMAT: FORMATS[what], WRITTEN_BY: version()}


def check(data: Mapping[str, Any], what: str, where: object) -> None:
    """Check that this version can read something.

    :param what: one of :data:`FORMATS`.
    :param where: the file it was read from, or the task that handed it on.
    :raises NewerFormatError: when its format is newer than this version knows.
    """
    number, newest = data.get(FORMAT, 1), FORMATS[what]
    if isinstance(number, int) and number > newest:
        writer = data.get(WRITTEN_BY)
        raise NewerFormatError(
            f"{where} is {what} in format {number}, written by saturn-airflow {writer or '(newer)'}; this is "
            f"saturn-airflow {version()}, which reads formats up to {newest}. Upgrade it here to "
            f"{f'{writer} or later' if writer else 'the version that wrote it'}; nothing was changed"
        )


def known_fields(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` without what the data class ``cls`` has no field for: a newer version may write more."""
    names = {f.name for f in dataclasses.fields(cls)}
    return {key: value for key, value in data.items() if key in names}


def version() -> str:
    """The version of this package."""
    return str(importlib.import_module("saturn_airflow").__version__)
