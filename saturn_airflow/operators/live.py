"""What a train task tells the plan page while its job trains: an XCom, now and again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saturn_airflow.model import formats, metrics
from saturn_airflow.model.curves import Curve
from saturn_airflow.operators.context import finite
from saturn_airflow.operators.shared_clock import PlansClock

if TYPE_CHECKING:
    from saturn_airflow.model.entries import PlanEntry

PROGRESS_KEY = "progress"
#: Seconds between two XComs: the least at first, later this share of how long it has gone on, the most at
#: last.
_LEAST, _SHARE, _MOST = 5.0, 0.05, 60.0
#: Of a step, what is told.
_STEP = ("step", "epoch", "loss", "lr", "samples_per_second", "eta_seconds")
#: Metrics with curves, at the most; of further ones the last value is told.
_CURVES = 6


class Live:
    """How far a job has come, and the curves of its losses and metrics.

    What is told has ``now`` (``time`` in seconds since the epoch, by the clock of who planned, ``step``,
    ``total`` and ``stops_at`` in steps, ``epoch`` from 0, ``loss``, ``lr``, ``samples_per_second``,
    ``eta_seconds`` from ``time`` to the job's last step, and ``metrics``, the last of each) and ``curves``
    (``[step, value]`` by metric).

    Telling holds up neither training nor the task that follows it: what Airflow does not take is dropped.

    :param push: tells Airflow.
    :param about: what is told besides.
    :param stops_at: the step at which the job is to stop in this round, where that is not its last.
    """

    def __init__(
        self,
        push: Callable[[Any], object],
        about: Mapping[str, Any],
        stops_at: int | None = None,
        clock: PlansClock | None = None,
    ) -> None:
        self.push, self._clock = push, clock or PlansClock()
        self.about = {**formats.stamp("progress"), **about}
        self._curves: dict[str, Curve] = {}
        self._now: dict[str, Any] = {"stops_at": stops_at}
        self._began = time.monotonic()
        self._told_at: float | None = None
        self._telling: threading.Thread | None = None
        #: Whether what comes next is trained otherwise than what was told.
        self._otherwise = False

    def hear(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take up what training said; what it said before of the same steps stays, but where they are trained
        otherwise now: by other code, or since a strategy was refused."""
        for event in events:
            kind = event["event"]
            if kind == "start":
                self._now["total"] = event.get("total_batches")
                self._begin_after(event.get("step") or 0)
            elif kind == "refused":
                self._otherwise = self._otherwise or event.get("step") is not None
            elif kind == "warning":
                self._otherwise = self._otherwise or bool(event.get("mixed"))
            elif kind == "step":
                self._begin_after(event["step"] - 1)
                if event["step"] >= self._now.get("step", 0):
                    self._now.update({key: event.get(key) for key in _STEP}, time=event["time"])
                self._curve("loss").add(event["step"], event.get("loss"))
            elif kind == "eval":
                found = metrics.of_event(event)
                self._now["metrics"] = {**self._now.get("metrics", {}), **found}
                for name, value in found.items():
                    if name in self._curves or len(self._curves) <= _CURVES:
                        self._curve(name).add(event["step"], value)

    def _begin_after(self, step: int) -> None:
        """Training begins after ``step``, which may have been passed before."""
        if not self._otherwise:
            return
        self._otherwise = False
        for curve in self._curves.values():
            curve.forget(step)
        if self._now.get("step", 0) > step:
            self._now = {key: self._now.get(key) for key in ("stops_at", "total")}

    def tell_now_and_again(self) -> None:
        """Tell, in the background, if it is time to."""
        now = time.monotonic()
        pause = min(_MOST, max(_LEAST, _SHARE * (now - self._began)))
        if "step" not in self._now or (self._told_at is not None and now - self._told_at < pause):
            return
        if self._telling is None or not self._telling.is_alive():
            self._told_at = now
            self._telling = threading.Thread(target=self._tell, args=(self.told(),), daemon=True)
            self._telling.start()

    def close(self) -> None:
        """Tell the last."""
        if self._telling is not None:
            self._telling.join(10)
        if "step" in self._now:
            self._tell(self.told())

    def told(self) -> dict[str, Any]:
        """What there is to tell."""
        curves = {name: curve.points() for name, curve in self._curves.items()}
        now = {k: v - self._clock.ahead() if k == "time" else v for k, v in self._now.items()}
        return dict(finite({**self.about, "now": now, "curves": curves}))

    def _tell(self, told: dict[str, Any]) -> None:
        # Airflow may be away, or the task no longer its own: the next word says more than this one.
        with contextlib.suppress(Exception):
            self.push(told)

    def _curve(self, name: str) -> Curve:
        return self._curves.setdefault(name, Curve())


def live_of(ti: Any, entry: PlanEntry, folder: str | Path, clock: PlansClock | None = None) -> Live:
    """What the page is told of a job, with all that its runs in ``folder`` have said so far.

    :param ti: the task instance that follows it.
    """
    from saturn_airflow.launch import runs

    about = {"job": entry.name, "attempt": entry.attempt}
    live = Live(lambda told: ti.xcom_push(PROGRESS_KEY, told), about, entry.most_batches, clock)
    for run in runs.all_of(folder):
        live.hear(run.so_far())
    return live
