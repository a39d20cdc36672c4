"""Data that databases hand back otherwise than they got them, as text, which they keep.

Airflow's XComs lie in a column of Postgres (``jsonb``) that sorts the keys of mappings, keeps numbers as
decimal digits, so that 1e16 comes back as a whole number and -0.0 as 0.0, and takes no text with a NUL in it.
What then is a whole number of more than 64 bits, Airflow hands to no task.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from saturn_airflow.model import json_text

#: The field of a mapping that holds, as text, those of its fields that would come back otherwise.
KEY = "as_json"
#: From here on Python writes floats with an exponent and without a point.
_WHOLE_FROM = 1e16
_INTS = range(-(2**63), 2**63)


def packed(fields: Mapping[str, Any], arguments: Mapping[str, int]) -> dict[str, Any]:
    """``fields``, JSON-ready, where all come back from wherever they are kept as they are now.

    :param arguments: by field, to which depth the mappings in it are arguments by name, whose order is all
        the same; by default that of none is.
    """
    kept = {name: _is_kept(value, arguments.get(name, 0)) for name, value in fields.items()}
    if all(kept.values()):
        return dict(fields)
    as_text = {name: value for name, value in fields.items() if not kept[name]}
    return {**{name: value for name, value in fields.items() if kept[name]}, KEY: json.dumps(as_text)}


def unpacked(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that :func:`packed` was given.

    :raises ValueError: for what it did not return.
    """
    fields = dict(data)
    if (text := fields.pop(KEY, None)) is None:
        return fields
    found = None
    with suppress(ValueError):
        found = json_text.parse(text) if isinstance(text, str) else None
    if not isinstance(found, dict) or found.keys() & fields.keys():
        raise ValueError(f"{KEY} is {text!r:.80}")
    return fields | found


def _is_kept(value: Any, unordered: int) -> bool:
    """:param unordered: to which depth the order of mappings is all the same."""
    if isinstance(value, str):
        return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, float):
        return abs(value) < _WHOLE_FROM and (value != 0 or math.copysign(1, value) > 0)
    if isinstance(value, int):
        return value in _INTS
    if isinstance(value, Mapping):
        in_order = unordered > 0 or list(value) == sorted(value, key=_as_sorted)
        return in_order and all(_is_kept(k, 0) and _is_kept(v, unordered - 1) for k, v in value.items())
    return all(_is_kept(item, unordered - 1) for item in value) if isinstance(value, list | tuple) else True


def _as_sorted(key: str) -> tuple[int, bytes]:
    as_bytes = key.encode(errors="surrogatepass")
    return len(as_bytes), as_bytes
