"""What a DAG run's conf says of jobs that are cleared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.operators import wishes

JOBS = ["a", "b"]


@pytest.mark.parametrize(
    ("conf", "wanted"),
    [
        (None, {"a": None, "b": None}),
        ({"other": 1}, {"a": None, "b": None}),
        ({"saturn": {}}, {"a": None, "b": None}),
        ({"saturn": {"from_scratch": True}}, {"a": "from_scratch", "b": "from_scratch"}),
        ({"saturn": {"from_scratch": False, "go_on": ["b"]}}, {"a": None, "b": "go_on"}),
        ({"saturn": {"from_scratch": ["a"], "go_on": True}}, {"a": "from_scratch", "b": "go_on"}),
        ({"saturn": {"from_scratch": True, "go_on": ["a"]}}, {"a": "go_on", "b": "from_scratch"}),
        ({"saturn": {"from_scratch": ["a"], "go_on": ["b"]}}, {"a": "from_scratch", "b": "go_on"}),
    ],
)
def test_who_is_named_gets_what_is_said_of_him(conf: Any, wanted: dict[str, Any]) -> None:
    wishes.check(conf, JOBS)
    assert {job: wishes.wish(conf, job) for job in JOBS} == wanted


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"saturn": "go_on"}, "saturn is 'go_on'; give it such as"),
        (
            {"saturn": {"scratch": True}},
            "no saturn.scratch; known are from_scratch, go_on and register",
        ),
        ({"saturn": {"go_on": "a"}}, "saturn.go_on is 'a'; give it such as"),
        ({"saturn": {"go_on": [1]}}, "saturn.go_on is [1]"),
        (
            {"saturn": {"go_on": ["c"]}},
            "saturn.go_on names 'c', which is no job of this sweep; its jobs are a, b",
        ),
        ({"saturn": {"go_on": True, "from_scratch": True}}, "wants from_scratch and go_on of all jobs"),
        ({"saturn": {"go_on": ["a"], "from_scratch": ["b", "a"]}}, "wants from_scratch and go_on of 'a'"),
    ],
)
def test_a_conf_that_can_not_be_meant_is_told_in_one_message(conf: Any, says: str) -> None:
    with pytest.raises(InvalidSweepError) as caught:
        wishes.check(conf, JOBS)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("run_type", "conf", "registers"),
    [
        ("scheduled", {}, True),
        ("manual", None, True),
        ("backfill", {}, False),
        ("backfill", {"saturn": {"go_on": True}}, False),
        ("backfill", {"saturn": {"register": True}}, True),
    ],
)
def test_a_backfill_registers_only_where_it_is_asked_to(run_type: str, conf: object, registers: bool) -> None:
    context: Any = {"dag_run": SimpleNamespace(run_type=run_type, conf=conf)}
    assert wishes.registers(context) is registers
