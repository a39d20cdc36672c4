from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow.model.metrics import TAKEN
from saturn_airflow.tracking.events import OTHERWISE, Recorder

STEP = {"event": "step", "epoch": 0, "loss": 2.0, "seconds": 0.5, "samples_per_second": 32.0, "lr": 1e-3}


def steps(records: list[dict[str, Any]]) -> list[int]:
    return [
        record["step"] for record in records if record["kind"] == "metrics" and "loss" in record["values"]
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=6))
def test_however_often_training_resumes_each_step_is_recorded_once(stretches: list[tuple[int, int]]) -> None:
    recorder = Recorder()
    seen: list[int] = []
    reached = -1
    for first, count in stretches:
        start = min(first, reached + 1)  # a resume goes back to some checkpoint
        for step in range(start, start + count):
            seen += steps(recorder.records({**STEP, "step": step, "time": float(step)}))
            reached = max(reached, step)
    assert seen == list(range(reached + 1))


def test_a_new_process_goes_on_after_the_last_recorded_step() -> None:
    recorder = Recorder(last_step=5, last_eval_step=5)
    assert recorder.records({**STEP, "step": 5}) == []
    assert recorder.records({"event": "eval", "step": 5, "epoch": 0, "eval_loss": 1.0}) == []
    assert steps(recorder.records({**STEP, "step": 6})) == [6]


def test_a_step_becomes_metrics_at_its_own_time() -> None:
    (record,) = Recorder().records({**STEP, "step": 3, "time": 1700000000.1234, "eta_seconds": 9.0})
    assert record["time"] == 1700000000123
    assert record["step"] == 3
    assert record["values"] == {
        "loss": 2.0,
        "step": 3.0,
        "epoch": 0.0,
        "lr": 1e-3,
        "seconds_per_batch": 0.5,
        "samples_per_second": 32.0,
        "eta_seconds": 9.0,
    }


def test_between_seconds_only_the_loss_is_recorded_and_the_end_brings_the_rest() -> None:
    recorder = Recorder()
    full, short = (recorder.records({**STEP, "step": n, "time": 100.0 + n / 10})[0] for n in (0, 1))
    assert set(full["values"]) > {"loss", "step"}
    assert set(short["values"]) == {"loss", "step"}
    (rest,) = recorder.records({"event": "end", "status": "finished", "time": 101.0})
    assert rest["step"] == 1
    assert rest["values"]["samples_per_second"] == 32.0
    assert "loss" not in rest["values"]


def test_a_clock_that_is_set_back_hides_no_metric() -> None:
    recorder = Recorder()
    for n, time in enumerate((7200.0, 3600.0)):
        (record,) = recorder.records({**STEP, "step": n, "time": time})
        assert set(record["values"]) > {"loss", "step"}


def test_a_loss_that_is_no_number_is_recorded_as_such() -> None:
    (record,) = Recorder().records({**STEP, "step": 0, "loss": math.nan})
    assert math.isnan(record["values"]["loss"])


def test_the_results_numbers_become_metrics_and_nothing_else_does() -> None:
    result = {
        "loss": 1.0,
        "epoch_loss": 1.5,
        "checkpoint": "/x",
        "ok": True,
        "none": None,
        "a b:c": 2,
        "seconds": 9,
    }
    (record,) = Recorder(last_step=7).records({"event": "end", "status": "finished", "result": result})
    assert record["values"] == {"epoch_loss": 1.5, "a b_c": 2.0, "train_seconds": 9.0}
    assert record["step"] == 7


def test_an_evaluation_has_the_jobs_own_metrics_by_step() -> None:
    event = {"event": "eval", "step": 4, "epoch": 0, "eval_loss": 1.0, "metrics": {"f1/macro": 0.5, "n": 3}}
    (record,) = Recorder().records(event)
    assert record["step"] == 4
    assert record["values"] == {"eval_loss": 1.0, "f1/macro": 0.5, "n": 3.0}


def test_no_metric_of_a_job_can_be_taken_for_one_of_saturns() -> None:
    result: dict[str, Any] = {"status": "finished", "metrics": {"f1": 0.5}}
    numbers: tuple[str, ...] = (
        "steps",
        "batches",
        "batches_per_epoch",
        "total_batches",
        "loss",
        "epoch_loss",
        "eval_loss",
    )
    numbers += ("seconds", "setup_seconds", "warmup_seconds", "seconds_per_batch", "spread")
    numbers += ("evaluation_seconds", "peak_device_bytes", "peak_host_bytes")
    result |= dict.fromkeys(numbers, 1.0)
    recorder = Recorder()
    records = [*recorder.records({**STEP, "step": 1}), *recorder.records({"event": "end", "result": result})]
    logged = {key for record in records for key in record["values"]}
    assert "f1" not in logged, "it is logged by step, where it was measured"
    assert logged <= TAKEN


def test_warnings_checkpoints_and_resumes_become_tags_and_unknown_events_nothing() -> None:
    recorder = Recorder()
    (warning,) = recorder.records({"event": "warning", "message": "slow"})
    assert warning == {"kind": "tags", "values": {"saturn.warning": "slow"}}
    (warning,) = recorder.records({"event": "warning", "message": "other code", "mixed": True})
    assert warning["values"] == {"saturn.warning": "other code", "saturn.mixed": "other code"}
    (checkpoint,) = recorder.records({"event": "checkpoint", "step": 4})
    assert checkpoint["values"] == {"saturn.checkpoint_step": "4"}
    (start,) = recorder.records({"event": "start", "step": 4})
    assert start["values"] == {"saturn.resumed_from": "4"}
    assert recorder.records({"event": "start", "step": 0}) == []
    assert recorder.records({"event": "waiting", "for": []}) == []


REFUSED = {"event": "refused", "technique": "ddp", "devices": 2, "reason": "it differs", "step": 9}
MIXED = {"event": "warning", "message": "its code has changed", "mixed": True}


@pytest.mark.parametrize("why", [REFUSED, MIXED])
def test_steps_that_are_trained_otherwise_than_before_are_recorded_again(why: dict[str, Any]) -> None:
    recorder = Recorder(last_step=9, last_eval_step=9, logged={"job.py:1": [9, 2]})
    (told,) = recorder.records({**why, "time": 5.0})
    assert (told["name"], told["time"]) == (OTHERWISE, 5000)
    for one in (recorder, Recorder(9, 9, {"job.py:1": [9, 2]}, otherwise=True)):  # another process goes on
        one.records({"event": "start", "step": 4})
        logged = {"event": "logged", "at": [5, 0], "source": "job.py:1", "metrics": [["own", 1.0, 0, 5]]}
        assert one.records(logged) != []
        assert steps([r for n in (4, 5, 6) for r in one.records({**STEP, "step": n})]) == [5, 6]
        assert one.records({"event": "eval", "step": 5, "epoch": 0, "eval_loss": 1.0}) != []
        one.records({"event": "start", "step": 4})
        assert one.records({**STEP, "step": 6}) == []


def test_what_was_refused_before_it_began_is_recorded_once() -> None:
    recorder = Recorder(last_step=9)
    assert recorder.records({**REFUSED, "step": None}) == []
    recorder.records({"event": "start", "step": 4})
    assert recorder.records({**STEP, "step": 9}) == []
