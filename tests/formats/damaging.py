"""Damaged inputs for readers of files, and what may come of them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saturn_airflow.model.errors import SaturnError

EXAMPLES = int(os.environ.get("SATURN_FUZZ_EXAMPLES", "60"))


# As JSON may have it, though nobody writes it: half a character, control codes, numbers without an end.
ODD = st.sampled_from(["\ud800", "\x00", "\x1b[2J", "../..", 10**400, -(10**30), 1e308, "9" * 5000])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


#: In their places, or for a whole file: deeper than Python's reader of JSON follows, and nearly so.
DEEP = {f"nested {depth}": b"[" * depth + b"]" * depth for depth in (200, 5_000)}


tried: Counter[str] = Counter()


#: Of those, the ones that were refused in a message, where the others were read as far as they can be.
refused: Counter[str] = Counter()


@st.composite
def damaged(draw: Any, valid: Any) -> bytes:
    """``valid`` as JSON with something lost, replaced, added or cut off; or anything."""
    how = draw(st.integers(0, 9))
    if how == 3:
        return bytes(draw(st.sampled_from([*DEEP.values(), b"[" * 5_000, b'{"a":' * 5_000])))
    if how == 0:
        return bytes(draw(st.binary(max_size=80)))
    if how == 1:
        return json.dumps(draw(ANYTHING)).encode()
    data = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 2))):
        place, key = data, None
        while isinstance(place, dict | list) and place:
            holder, keys = place, sorted(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(list(keys)))
            place = holder[key]
            if draw(st.booleans()):
                break
        if key is not None:
            if draw(st.booleans()):
                holder[key] = draw(ANYTHING | st.sampled_from(list(DEEP)))
            else:
                del holder[key]
    text = json.dumps(data).encode()
    for name, nested in DEEP.items():
        text = text.replace(json.dumps(name).encode(), nested)
    return text[: draw(st.integers(0, len(text)))] if how == 2 else text


def fuzz(valid: Any) -> Callable[[Any], Any]:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return lambda test: settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=quiet)(
        given(damaged(valid))(test)
    )


@contextlib.contextmanager
def one_message(name: str) -> Iterator[Path]:
    """A folder, in which only the product's own errors may happen, with one line that names the file."""
    tried[name] += 1
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__SATURN__HOME", folder)
        try:
            yield Path(folder)
        except SaturnError as error:
            refused[name] += 1
            if not str(error).strip():
                raise AssertionError("an error without words") from error
