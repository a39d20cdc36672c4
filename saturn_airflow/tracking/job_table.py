"""Tables as MLflow's UI shows them: a row per job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows in the form of MLflow's table artifacts (a data frame's ``orient="split"``)."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    data = [[_cell(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}).encode()


def with_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A job's outcome with its own metrics each in a column."""
    return {key: value for key, value in row.items() if key != "metrics"} | dict(row.get("metrics") or {})


def _cell(value: Any) -> Any:
    return (
        value
        if value is None or isinstance(value, str | int | float | bool)
        else json.dumps(value, default=str)
    )
