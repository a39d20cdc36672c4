"""What training reports, as records for MLflow."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from saturn_airflow.model.metrics import TAKEN
from saturn_airflow.model.plain_numbers import is_number
from saturn_airflow.model.status import Status
from saturn_airflow.tracking import parameters

Event = Mapping[str, Any]

#: Fields of a ``step`` event and the metrics they become; all but the first two at most once a second.
STEP_METRICS = {
    "loss": "loss",
    "step": "step",
    "epoch": "epoch",
    "lr": "lr",
    "seconds": "seconds_per_batch",
    "samples_per_second": "samples_per_second",
    "eta_seconds": "eta_seconds",
}
EVERY_STEP = ("loss", "step")
#: Numbers of the ``end`` event's result whose names would say too little, or mean something else by step.
RESULT_METRICS = {
    "seconds": "train_seconds",
    "seconds_per_batch": "mean_seconds_per_batch",
    "spread": "seconds_per_batch_spread",
}
#: How a job or sweep may end, and what MLflow calls it.
STATUSES: dict[str, str] = {
    Status.FINISHED: "FINISHED",
    Status.FAILED: "FAILED",
    Status.STOPPED: "KILLED",
    Status.PRUNED: "KILLED",
}
#: Milliseconds between two steps of which all metrics are recorded.
_PAUSE_MS = 1000
#: The name of records after which steps that were recorded already are trained otherwise, and recorded again.
OTHERWISE = "otherwise"


#: Tags that are not for a job's code to set: what the run is, and whose.
_RESERVED_TAGS = (
    "saturn.",
    "airflow.",
    "mlflow.runName",
    "mlflow.parentRunId",
    "mlflow.user",
    "mlflow.source",
)


class Recorder:
    """Turns the events of one job into records, each step once however often training resumes; again only
    where it is trained otherwise than before: by other code, or since a strategy was refused.

    :param last_step: the last step that is recorded already; -1 for none.
    :param last_eval_step: the same for evaluations.
    :param logged: by where in the job's code metrics are logged, when in the training that was last recorded
        of them: the step, and their number in that step.
    :param otherwise: whether what is trained next is trained otherwise than what is recorded.
    """

    def __init__(
        self,
        last_step: int = -1,
        last_eval_step: int = -1,
        logged: Mapping[str, list[int]] | None = None,
        otherwise: bool = False,
    ) -> None:
        self.last_step = last_step
        self._last_eval_step = last_eval_step
        self._logged = dict(logged or {})
        self._otherwise = otherwise
        self._last_full = 0
        self._held_back: dict[str, Any] | None = None

    def records(self, event: Event) -> list[dict[str, Any]]:
        """The records of one event; none where it says nothing new."""
        now = round(1000 * event.get("time", time.time()))
        match event.get("event"):
            case "step":
                return self._step(event, now)
            case "eval":
                return self._eval(event, now)
            case "leased" if "technique" in event:
                under = {"technique": event["technique"], "devices": len(event["devices"])}
                return [{"kind": "params", "values": parameters.flat(under)}]
            case "start":
                self._begin_after(int(event["step"]))
                tags = {"saturn.resumed_from": event.get("step") or None}
            case "checkpoint":
                tags = {"saturn.checkpoint_step": event.get("step")}
            case "warning":
                message = event.get("message")
                tags = {"saturn.warning": message, "saturn.mixed": message if event.get("mixed") else None}
                if event.get("mixed"):
                    return [self._from_here_otherwise(tags, now)]
            case "refused" if event.get("step") is not None:
                told = f"{event['technique']} x {event['devices']}: {event['reason']}"
                return [self._from_here_otherwise({"saturn.refused": told}, now)]
            case "logged":
                return self._logged_by_job(event)
            case "end":
                return self._end(event, now)
            case _:
                return []
        values = parameters.tags(tags)
        return [{"kind": "tags", "values": values}] if values else []

    def _from_here_otherwise(self, tags: Mapping[str, Any], now: int) -> dict[str, Any]:
        self._otherwise = True
        return {"kind": "tags", "name": OTHERWISE, "time": now, "values": parameters.tags(tags)}

    def _begin_after(self, step: int) -> None:
        """Training begins after ``step``, which may have been passed before."""
        if self._otherwise:
            self.last_step, self._last_eval_step = min(self.last_step, step), min(self._last_eval_step, step)
            self._logged = {source: min(at, [step + 1]) for source, at in self._logged.items()}
            self._otherwise = False

    def _step(self, event: Event, now: int) -> list[dict[str, Any]]:
        """The record of a step: all of it at most once a second, else its loss alone.

        What was left out of the last one is recorded with the training's end.
        """
        step = int(event["step"])
        self._begin_after(step - 1)  # whoever recorded before may have heard that it began
        if step <= self.last_step:
            return []
        self.last_step = step
        values = _numbers({metric: event.get(field) for field, metric in STEP_METRICS.items()})
        values |= _numbers(event.get("metrics") or {})
        full = {"kind": "metrics", "name": "step", "step": step, "time": now, "values": values}
        if abs(now - self._last_full) >= _PAUSE_MS:  # the clock may be set back
            self._last_full, self._held_back = now, None
            return [full]
        self._held_back = full
        return [{**full, "values": {k: v for k, v in values.items() if k in EVERY_STEP}}]

    def _eval(self, event: Event, now: int) -> list[dict[str, Any]]:
        step = int(event["step"])
        if step <= self._last_eval_step:
            return []
        self._last_eval_step = step
        told = {k: v for k, v in event.items() if k not in ("event", "time", "step", "epoch", "metrics")}
        values = _numbers({**told, **(event.get("metrics") or {})})
        return [{"kind": "metrics", "name": "eval", "step": step, "time": now, "values": values}]

    def _logged_by_job(self, event: Event) -> list[dict[str, Any]]:
        """The records of what the job's own code logged with MLflow."""
        records: list[dict[str, Any]] = []
        if params := parameters.flat(event.get("params") or {}):
            records.append({"kind": "params", "values": params})
        told = {k: v for k, v in (event.get("tags") or {}).items() if not k.startswith(_RESERVED_TAGS)}
        if tags := parameters.tags(told):
            records.append({"kind": "tags", "values": tags})
        at, source = event.get("at"), event.get("source", "")
        if at is not None:
            # A step that is trained again, after a resume, is logged again.
            if at <= self._logged.get(source, []):
                return records
            self._logged[source] = at
        for name, value, time_ms, step in event.get("metrics") or ():
            values = _numbers({f"job/{name}" if name in TAKEN else name: value})
            if values:
                record = {"kind": "metrics", "name": "job", "step": step, "time": time_ms, "values": values}
                records.append({**record, "logged": dict(self._logged)})
        return records

    def _end(self, event: Event, now: int) -> list[dict[str, Any]]:
        records = []
        if self._held_back is not None:
            rest = {k: v for k, v in self._held_back["values"].items() if k not in EVERY_STEP}
            records.append({**self._held_back, "values": rest})
            self._held_back = None
        if event.get("status") == Status.FINISHED and event.get("reason"):
            records.append(
                {"kind": "tags", "values": parameters.tags({"saturn.ended_early": event["reason"]})}
            )
        by_step = {*STEP_METRICS.values(), "eval_loss"}
        result = {RESULT_METRICS.get(k, k): v for k, v in (event.get("result") or {}).items()}
        result = {k: v for k, v in result.items() if k not in by_step}
        if numbers := _numbers(result):
            step = max(self.last_step, 0)
            records.append(
                {"kind": "metrics", "name": "result", "step": step, "time": now, "values": numbers}
            )
        return records


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        parameters.metric_key(key): float(value)
        for key, value in values.items()
        if is_number(value) and not _is_huge(value)
    }


def _is_huge(value: float) -> bool:
    try:
        return math.isinf(float(value))
    except OverflowError:
        return True
