"""What techniques report of a training: checked where it is reported, and put together at its end."""

from __future__ import annotations

import math
import numbers
import statistics
import time
from collections.abc import Mapping
from typing import Any

from saturn_airflow.launch import event_fields

Event = dict[str, Any]

_STEP = "such as emit('step', step=3, loss=0.5)"
_EVAL = "such as emit('eval', step=300, epoch=0, eval_loss=0.5, metrics={'accuracy': 0.9})"


class EventChecker:
    """Checks the events of one process, and adds to them what can be told without their author.

    The author of an event ``step`` gives ``step`` (from 1) and ``loss``, of an ``eval`` its ``step``, and
    ``eval_loss`` or ``metrics``. What else there is of a step: ``epoch`` (from 0), ``seconds`` (since the
    step before), ``lr``, ``samples_per_second`` and ``eta_seconds`` (None where nobody knows).
    """

    def __init__(self) -> None:
        self._last = time.monotonic()

    def complete(self, event: str, fields: Mapping[str, Any]) -> Event:
        """The whole event.

        :raises TypeError: naming the field that it lacks, or that is no number; for what is not its author's
            to say.
        """
        if event == "step":
            return _checked(self._step(dict(fields)), _STEP)
        if event == "eval":
            return _checked(_evaluation(dict(fields)), _EVAL)
        if event in event_fields.SUPERVISORS:
            raise TypeError(f"emit({event!r}) is not for a technique to say; give the event another name")
        told = {"event": event, **fields}
        if (name := event_fields.lacking(told)) is not None:
            raise TypeError(
                f"emit({event!r}) has {name}={fields.get(name)!r:.80}: Saturn's own events of this name have "
                "something else there; give yours another name"
            )
        return told

    def _step(self, fields: Event) -> Event:
        for name in ("step", "loss"):
            fields[name] = _number(fields, name, "step", _STEP)
        now = time.monotonic()
        took, self._last = now - self._last, now
        optional = {"epoch": 0, "seconds": took, "lr": None, "samples_per_second": None, "eta_seconds": None}
        for name in optional.keys() & fields.keys():
            if fields[name] is None:  # as where it is left out
                del fields[name]
            else:
                fields[name] = _number(fields, name, "step", _STEP)
        return {"event": "step", **optional, **fields}


class ReportedResult:
    """What a training's events say came of it, for a technique that trains by itself.

    Its time begins when this is made.
    """

    def __init__(self) -> None:
        self._losses: dict[int, dict[int, float]] = {}
        self._first: int | None = None
        self._result: dict[str, Any] = {}
        self._speed = _Speed()

    def add(self, event: Mapping[str, Any]) -> None:
        """Take account of an event."""
        if event.get("event") == "start":
            self._speed.begin(event.get("step"))
        elif event.get("event") == "step":
            step = int(event["step"])
            if step <= self._result.get("steps", 0):  # who trains was killed after what it saved last
                self._forget(step)
            self._first = step if self._first is None else min(self._first, step)
            self._losses.setdefault(int(event["epoch"]), {})[step] = event["loss"]
            self._result |= {"loss": event["loss"], "steps": step}
            self._speed.step(step)
        elif event.get("event") == "eval":
            self._result |= {
                key: event[key] for key in ("eval_loss", "metrics") if event.get(key) is not None
            }

    def go_on_from(self, earlier: ReportedResult) -> None:
        """Be the result of a training that an earlier run began, which has told ``earlier``."""
        if self._first is not None:
            earlier._forget(self._first)
        for epoch, losses in earlier._losses.items():
            self._losses[epoch] = {**losses, **self._losses.get(epoch, {})}
        self._result = {**earlier._result, **self._result}

    def _forget(self, step: int) -> None:
        """Forget what was told of ``step`` and of later ones."""
        for epoch, losses in list(self._losses.items()):
            self._losses[epoch] = {told: loss for told, loss in losses.items() if told < step}
            if not self._losses[epoch]:
                del self._losses[epoch]

    def result(self) -> dict[str, Any]:
        """``loss``, ``steps``, ``epoch_loss``, ``eval_loss`` and ``metrics``, as far as they were told; where
        this run told of steps, ``batches``, ``seconds_per_batch`` and ``setup_seconds``, by when that was.

        ``epoch_loss`` is the mean of the losses of the last epoch's steps that were told.
        """
        if not self._losses:
            return dict(self._result)
        last = self._losses[max(self._losses)]
        return {"epoch_loss": statistics.fmean(last.values()), **self._result, **self._speed.result()}


class _Speed:
    """How fast a training was, by when it told of its steps."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._start: int | None = None
        self._told: list[tuple[int, float]] = []
        self._in_one_go = True

    def begin(self, step: Any) -> None:
        """Training begins after ``step``, if it says after which."""
        self._in_one_go = self._in_one_go and not self._told
        self._start = step if isinstance(step, int) else None

    def step(self, step: int) -> None:
        """Training has come to ``step``."""
        self._in_one_go = self._in_one_go and (not self._told or step > self._told[-1][0])
        # The first and the last step are enough.
        self._told[1:] = [(step, time.monotonic())]

    def result(self) -> dict[str, Any]:
        """Empty where the steps do not tell."""
        if not self._in_one_go or len(self._told) < 2:
            return {}
        (first, began), (last, ended) = self._told
        seconds = (ended - began) / (last - first)
        start = first - 1 if self._start is None else self._start
        return {
            "batches": last - start,
            "seconds_per_batch": seconds,
            "setup_seconds": max(0.0, began - self._began - seconds * (first - start)),
        }


def _evaluation(fields: Event) -> Event:
    fields["step"] = _number(fields, "step", "eval", _EVAL)
    measured = fields.get("metrics") or {}
    if not isinstance(measured, Mapping):
        raise TypeError(f"emit('eval') has metrics={measured!r}; give a mapping of numbers, {_EVAL}")
    if fields.get("eval_loss") is None and not measured:
        raise TypeError(f"emit('eval') lacks 'eval_loss' and 'metrics'; give one of them, {_EVAL}")
    if fields.get("eval_loss") is not None:
        fields["eval_loss"] = _number(fields, "eval_loss", "eval", _EVAL)
    if measured:
        fields["metrics"] = {str(name): _number(measured, name, "eval", _EVAL) for name in measured}
    if fields.get("epoch") is None:
        fields["epoch"] = 0
    fields["epoch"] = _number(fields, "epoch", "eval", _EVAL)
    return {"event": "eval", **fields}


def _checked(event: Event, example: str) -> Event:
    """``event``, if whoever reads it can make use of it: else it would be left out there."""
    if (name := event_fields.lacking(event)) is not None:
        raise TypeError(f"emit({event['event']!r}) has {name}={event.get(name)!r:.80}: too large, {example}")
    return event


def _number(fields: Mapping[str, Any], name: str, event: str, example: str) -> int | float:
    if name not in fields:
        raise TypeError(f"emit({event!r}) lacks {name!r}, {example}")
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"emit({event!r}) has {name}={value!r:.80}, a {type(value).__name__}; give a number, {example}"
        )
    number = float(value)
    if name not in ("step", "epoch"):
        return number
    if not math.isfinite(number) or number != int(number):
        raise TypeError(f"emit({event!r}) has {name}={value!r}; give a whole number, {example}")
    first = 1 if (name, event) == ("step", "step") else 0  # an evaluation may come before any step
    if number < first:
        raise TypeError(f"emit({event!r}) has {name}={value!r}; {name}s count from {first}, {example}")
    return int(number)
