"""What a technique of one's own reports: complete, or refused by the name of what is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from saturn_airflow.launch import event_fields
from saturn_airflow.launch.emitted import EventChecker, ReportedResult
from saturn_airflow.operators.progress_in_log import ProgressLog
from saturn_airflow.tracking.events import Recorder


def test_what_the_docs_ask_for_is_enough_for_all_who_listen() -> None:
    emitted, told = EventChecker(), ReportedResult()
    events = [
        emitted.complete("step", {"step": 1, "loss": np.float32(0.5)}),
        emitted.complete("step", {"step": np.int64(2), "loss": 0.25}),
        emitted.complete("eval", {"step": 2, "eval_loss": 0.4, "metrics": {"accuracy": np.float64(0.9)}}),
    ]
    said: list[str] = []

    class Log:
        def info(self, message: str, *args: Any) -> None:
            said.append(message % args)

    progress_log, recorder = ProgressLog(Log(), "here"), Recorder()
    for event in events:
        told.add(event)
        progress_log.tell({**event, "time": 1000.0})
        assert recorder.records({**event, "time": 1000.0})
    assert said == ["Step 1 (epoch 0): loss 0.5000", "Epoch 0: eval_loss 0.4000, accuracy 0.9000"]
    result = told.result()
    assert result.pop("batches") == 2
    assert result.pop("seconds_per_batch") > 0
    assert result.pop("setup_seconds") >= 0
    assert result == {
        "loss": 0.25,
        "steps": 2,
        "epoch_loss": 0.375,
        "eval_loss": 0.4,
        "metrics": {"accuracy": 0.9},
    }


def test_what_is_none_is_as_what_is_left_out() -> None:
    """Not left out by all who read it, as a step without its seconds would be."""
    optional = dict.fromkeys(["epoch", "seconds", "lr", "samples_per_second", "eta_seconds"])
    event = EventChecker().complete("step", {"step": 1, "loss": 0.5, **optional})
    assert event_fields.lacking(event) is None
    assert event["epoch"] == 0
    event = EventChecker().complete("eval", {"step": 1, "eval_loss": 0.5, "epoch": None})
    assert (event_fields.lacking(event), event["epoch"]) == (None, 0)


def test_the_times_of_steps_say_how_fast_training_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("saturn_airflow.launch.emitted.time.monotonic", lambda: now[0])

    def speed(*steps: tuple[int, float], start: int | None = 0) -> dict[str, Any]:
        now[0] = 100.0
        told = ReportedResult()
        if start is not None:
            told.add({"event": "start", "step": start})
        for step, at in steps:
            now[0] = at
            told.add({"event": "step", "step": step, "epoch": 0, "loss": 1.0})
        result = told.result()
        return {
            name: result[name] for name in ("batches", "seconds_per_batch", "setup_seconds") if name in result
        }

    # Four seconds until the first batch began, then half a second each.
    assert speed((1, 104.5), (2, 105.0), (5, 106.5)) == {
        "batches": 5,
        "seconds_per_batch": 0.5,
        "setup_seconds": 4.0,
    }
    assert speed((10, 109.0), (20, 114.0))["setup_seconds"] == 4.0
    assert speed((31, 101.0), (40, 110.0), start=30)["batches"] == 10
    assert speed((1, 101.0), (2, 102.0), start=None)["batches"] == 2
    assert speed((1, 101.0)) == speed((5, 101.0), (5, 102.0)) == speed((9, 101.0), (2, 102.0)) == {}


@pytest.mark.parametrize(
    ("event", "fields", "words"),
    [
        ("step", {"loss": 0.5}, "emit('step') lacks 'step'"),
        ("step", {"step": 1}, "emit('step') lacks 'loss', such as emit('step', step=3, loss=0.5)"),
        ("step", {"step": 1, "loss": "low"}, "loss='low', a str; give a number"),
        ("step", {"step": 1.5, "loss": 0.5}, "step=1.5; give a whole number"),
        ("step", {"step": 0, "loss": 0.5}, "step=0; steps count from 1"),
        ("step", {"step": 1, "loss": 0.5, "epoch": -1}, "epoch=-1; epochs count from 0"),
        ("eval", {"step": -1, "eval_loss": 0.5}, "step=-1; steps count from 0"),
        ("step", {"step": 1, "loss": 0.5, "epoch": "first"}, "epoch='first', a str"),
        ("step", {"step": 10**30, "loss": 0.5}, ": too large, such as"),
        ("eval", {"eval_loss": 0.5}, "emit('eval') lacks 'step'"),
        ("eval", {"step": 10**30, "eval_loss": 0.5}, ": too large, such as"),
        ("eval", {"step": 1}, "lacks 'eval_loss' and 'metrics'; give one of them"),
        ("eval", {"step": 1, "metrics": {"f1": None}}, "f1=None, a NoneType"),
        ("eval", {"step": 1, "metrics": 0.5}, "metrics=0.5; give a mapping"),
        ("end", {"status": "finished"}, "emit('end') is not for a technique to say"),
        ("checkpoint", {"step": 5, "path": "p"}, "emit('checkpoint') has seconds=None"),
        ("start", {}, "emit('start') has step=None"),
        ("warning", {"message": ["a", "b"]}, "emit('warning') has message=['a', 'b']"),
    ],
)
def test_a_missing_field_is_one_message_that_names_it(event: str, fields: Any, words: str) -> None:
    with pytest.raises(TypeError) as raised:
        EventChecker().complete(event, fields)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
