"""What a technique of one's own reports: complete, or refused by the name of what is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from saturn_airflow.launch.emitted import Emitted, Told
from saturn_airflow.operators.telling import Teller
from saturn_airflow.tracking.events import Recorder


def test_what_the_docs_ask_for_is_enough_for_all_who_listen() -> None:
    emitted, told = Emitted(), Told()
    events = [
        emitted.complete("step", {"step": 1, "loss": np.float32(0.5)}),
        emitted.complete("step", {"step": np.int64(2), "loss": 0.25}),
        emitted.complete("eval", {"step": 2, "eval_loss": 0.4, "metrics": {"accuracy": np.float64(0.9)}}),
    ]
    said: list[str] = []

    class Log:
        def info(self, message: str, *args: Any) -> None:
            said.append(message % args)

    teller, recorder = Teller(Log(), "here"), Recorder()
    for event in events:
        told.hear(event)
        teller.tell({**event, "time": 1000.0})
        assert recorder.records({**event, "time": 1000.0})
    assert said == ["Step 1 (epoch 0): loss 0.5000", "Epoch 0: eval_loss 0.4000, accuracy 0.9000"]
    assert told.result() == {
        "loss": 0.25,
        "steps": 2,
        "epoch_loss": 0.375,
        "eval_loss": 0.4,
        "metrics": {"accuracy": 0.9},
    }


@pytest.mark.parametrize(
    ("event", "fields", "words"),
    [
        ("step", {"loss": 0.5}, "emit('step') lacks 'step'"),
        ("step", {"step": 1}, "emit('step') lacks 'loss', such as emit('step', step=3, loss=0.5)"),
        ("step", {"step": 1, "loss": "low"}, "loss='low', a str; give a number"),
        ("step", {"step": 1.5, "loss": 0.5}, "step=1.5; give a whole number"),
        ("step", {"step": 1, "loss": 0.5, "epoch": "first"}, "epoch='first', a str"),
        ("eval", {"eval_loss": 0.5}, "emit('eval') lacks 'step'"),
        ("eval", {"step": 1}, "lacks 'eval_loss' and 'metrics'; give one of them"),
        ("eval", {"step": 1, "metrics": {"f1": None}}, "f1=None, a NoneType"),
        ("eval", {"step": 1, "metrics": 0.5}, "metrics=0.5; give a mapping"),
    ],
)
def test_a_missing_field_is_one_message_that_names_it(event: str, fields: Any, words: str) -> None:
    with pytest.raises(TypeError) as raised:
        Emitted().complete(event, fields)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
