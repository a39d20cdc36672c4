"""What a train task tells the pages while its job trains."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saturn_airflow.model.curves import Curve
from saturn_airflow.model.selection import SuccessiveHalving, select, what_doomed
from saturn_airflow.operators.live import Live


# A busy machine is slow; that says nothing of curves.
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.floats(-1e6, 1e6), max_size=400))
def test_a_curve_is_short_in_order_and_keeps_the_mean(values: Any) -> None:
    curve = Curve(8)
    for step, value in enumerate(values):
        curve.add(step, value)
        curve.add(step, 1e9)  # trained again after a resume
    points = curve.points()
    assert len(points) <= 8
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert bool(points) == bool(values)
    if values:
        assert points[-1][0] == len(values) - 1
        total, count = (sum(part[i] for part in curve._parts) for i in (1, 2))
        assert (total, count) == (pytest.approx(sum(values), abs=1e-3), len(values))  # type: ignore[comparison-overlap]


def test_a_curve_leaves_out_what_is_no_number() -> None:
    curve = Curve()
    for step, value in enumerate((1.0, math.nan, math.inf, None, True, 3.0)):
        curve.add(step, value)
    assert curve.points() == [[0, 1.0], [5, 3.0]]


def step(number: Any, **fields: Any) -> Any:
    return {
        "event": "step",
        "time": 100.0 + number,
        "step": number,
        "epoch": 0,
        "loss": 1.0 / number,
        **fields,
    }


def test_what_is_told_is_small_and_of_the_last_step() -> None:
    told: list[Any] = []
    live = Live(told.append, {"job": "a", "attempt": 7.5}, stops_at=2000)
    live.tell_now_and_again()
    assert told == [], "nothing has been trained yet"
    live.hear([{"event": "start", "total_batches": 5000}])
    live.hear(step(number, eta_seconds=9.0) for number in range(1, 2001))
    live.hear([{"event": "eval", "step": 2000, "epoch": 0, "eval_loss": 0.25, "metrics": {"f1": math.nan}}])
    live.close()
    (last,) = told
    assert (last["job"], last["attempt"], last["format"]) == ("a", 7.5, 1)
    now = last["now"]
    assert (now["step"], now["total"], now["stops_at"], now["time"]) == (2000, 5000, 2000, 2100.0)
    assert now["metrics"] == {"eval_loss": 0.25, "f1": None}
    assert last["curves"]["eval_loss"] == [[2000, 0.25]]
    assert len(json.dumps(last, allow_nan=False)) < 4000


def test_an_airflow_that_is_away_or_slow_holds_nobody_up() -> None:
    asked, answered = [], threading.Event()

    def away(told: Any) -> None:
        asked.append(told)
        answered.wait()
        raise ConnectionError

    live = Live(away, {})
    live.hear([step(1)])
    for _ in range(1000):
        live.tell_now_and_again()  # all of them come back before Airflow has answered
    assert len(asked) <= 1
    answered.set()
    live.close()
    assert len(asked) == 2, "the last word is told"


def test_steps_of_a_resumed_run_do_not_turn_progress_back() -> None:
    live = Live(lambda told: None, {})
    live.hear([step(1), step(2), step(3)])
    live.hear([step(2)])
    assert live.told()["now"]["step"] == 3
    assert len(live.told()["curves"]["loss"]) == 3


def test_what_a_refused_strategy_trained_is_not_what_the_job_shows() -> None:
    refused = {"event": "refused", "technique": "ddp", "devices": 2, "reason": "it differs", "step": 100}
    began = {"event": "start", "step": 20, "total_batches": 200, "time": 1.0}
    before = [step(number, loss=9.0) for number in range(1, 101)]
    after = [step(number, loss=1.0) for number in range(21, 31)]
    live = Live(lambda told: None, {}, stops_at=150)
    live.hear([{**began, "step": 0}, *before, {"event": "eval", "step": 100, "epoch": 0, "eval_loss": 9.0}])
    live.hear([refused, began])
    assert live.told()["now"] == {"stops_at": 150, "total": 200}
    live.hear(after)
    told = live.told()
    assert (told["now"]["step"], told["now"]["loss"]) == (30, 1.0)
    assert {value for number, value in told["curves"]["loss"] if number > 20} == {1.0}
    assert told["curves"]["eval_loss"] == []
    # A strategy that was refused before it trained, or ran out of memory, takes nothing back.
    live.hear([{**refused, "step": None}, began, step(21, loss=5.0)])
    assert live.told()["now"]["step"] == 30


def test_the_value_that_doomed_a_job_is_told_beside_those_of_who_stays() -> None:
    histories = {
        "a": {1.0: 0.9},
        "b": {1.0: 0.5},
        "c": {1.0: 0.4, 2.0: 0.1},
        "gone": {0.5: 3.0},
        "d": {1.0: 0.8},
    }
    going = ["a", "b", "c", "d"]
    found = select(SuccessiveHalving("epoch_loss"), histories, going, "epoch_loss")
    assert set(found.pruned) == {"a", "d"}
    assert what_doomed(found.pruned, histories, going, "epoch_loss")["a"] == (
        "epoch_loss 0.9 after 1 epoch; those that stay had 0.4 to 0.5 by then"
    )
    assert what_doomed(["x"], {"x": {}}, [], "epoch_loss") == {"x": "it has no epoch_loss"}
