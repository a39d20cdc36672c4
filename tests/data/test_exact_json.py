"""Jobs on their way through Airflow's XComs, which on Postgres are a column of the type ``jsonb``."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow import HParams, Job
from saturn_airflow.model import exact_json
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import InvalidSweepError


def through_postgres(value: Any) -> Any:
    """What comes back: keys by length and bytes, numbers by digits; NUL and halves of pairs are refused."""
    if isinstance(value, str):
        assert "\0" not in value
        value.encode()
    elif isinstance(value, float):
        digits = format(Decimal(repr(value)), "f").removeprefix("-" if value == 0 else "\0")
        return json.loads(digits)
    elif isinstance(value, dict):
        keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
        return {through_postgres(key): through_postgres(value[key]) for key in keys}
    elif isinstance(value, list):
        return [through_postgres(item) for item in value]
    elif isinstance(value, int) and not isinstance(value, bool):
        assert -(2**63) <= value < 2**64, "msgpack, by which Airflow hands it to a task"
    return value


def as_text(value: Any) -> str:
    return json.dumps(value)


def job(**model_args: Any) -> Job:
    return Job("a", "m:model", "m:data", "m:loss", model_args=model_args, hparams=HParams(lr=0.1))


@pytest.mark.parametrize(
    "argument",
    [
        {"zz": 1, "conv": 2, "a": 3},
        [{"b": {"y": 1, "x": 2}}],
        1e16,
        -1e30,
        1e300,
        -0.0,
    ],
)
def test_an_argument_comes_back_as_it_was(argument: Any) -> None:
    before = job(x=argument, y=1)
    handed_on = before.to_dict()
    assert exact_json.KEY in handed_on
    after = Job.from_dict(through_postgres(json.loads(as_text(handed_on))))
    assert as_text(after.model_args) == as_text(before.model_args)
    assert type(after.model_args["x"]) is type(argument)
    assert Definition.of(after).hash == Definition.of(before).hash
    assert after.name == "a"
    assert after.hparams == before.hparams


def test_a_learning_rate_comes_back_as_it_was() -> None:
    before = Job("a", "m:model", "m:data", "m:loss", hparams=HParams(lr=1e30))
    after = Job.from_dict(through_postgres(before.to_dict()))
    assert after == before
    assert isinstance(after.hparams.lr, float)


@pytest.mark.parametrize(
    "argument", [0.1, 1.0, 1e-300, 2**53 + 1, True, None, "text", [1, 2.5], {"a": 1, "bb": 2}]
)
def test_what_is_kept_anyway_is_handed_on_as_it_is(argument: Any) -> None:
    assert job(y=1, x=argument, longer=2).to_dict() == job(y=1, x=argument, longer=2).fields()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=3), VALUES, max_size=3))
def test_whatever_fits_in_json_comes_back_as_it_was(fields: dict[str, Any]) -> None:
    fields.pop(exact_json.KEY, None)
    names = {f"f{number}": value for number, value in enumerate(fields.values())}
    back = exact_json.unpacked(through_postgres(exact_json.packed(names, {})))
    assert {name: as_text(value) for name, value in back.items()} == {
        name: as_text(value) for name, value in names.items()
    }


@pytest.mark.parametrize("text", ["[", "[1]", 5, '{"name": "b"}'])
def test_other_text_is_refused(text: object) -> None:
    with pytest.raises(InvalidSweepError, match=r"job 'a': as_json is .*, which no Job.to_dict\(\) wrote"):
        Job.from_dict({**job().to_dict(), exact_json.KEY: text})
