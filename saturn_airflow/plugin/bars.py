"""The bars of the chart: where and when each job was to run, round by round, and where and when it did."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from saturn_airflow.model import untold_ends
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.plugin.queries import ENDED, NEVER_RAN, PLAN, REPORT, TRAIN, Record, Task

#: States of a train task that has devices, or waits for them.
GOING = ("running", "deferred")
#: A node's name and the device's number there.
Device = tuple[str, int]


@dataclass
class Bar:
    """One job in one round: where it was to run, where and when it did. Times are seconds since the epoch.

    :param planned_start: when it was to start by its plan.
    :param superseded_at: when the next round's plan took the place of this one's.
    :param before: the job's bar in an earlier round.
    :param task: its train task; None where none is known yet.
    :param outcome: what that task returned of the job; empty as long as it has not.
    :param progress: how far the job has come, as its task told last.
    :param status: an outcome's, or ``running``, ``waiting``, ``waiting for devices``, ``retrying``,
        ``skipped``, ``not run`` or ``lost``.
    :param held: seconds it had its devices; less than from start to end where it was interrupted.
    :param expected_end: when it is expected to end, of one that runs or waits.
    """

    round: int
    assignment: Assignment
    planned_start: float = 0.0
    superseded_at: float | None = None
    before: Bar | None = None
    task: Task | None = None
    outcome: Mapping[str, Any] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    status: str = "waiting"
    reason: str | None = None
    start: float | None = None
    end: float | None = None
    held: float | None = None
    expected_end: float | None = None

    @property
    def job(self) -> str:
        """The job's name."""
        return self.assignment.job

    @cached_property
    def devices(self) -> frozenset[Device]:
        """The devices it was given."""
        return frozenset((self.assignment.node, device) for device in self.assignment.device_ids)

    @property
    def place(self) -> tuple[str, frozenset[Device]]:
        """Its technique and devices."""
        return self.assignment.technique, self.devices

    @property
    def has_run(self) -> bool:
        """Whether it ever had its devices, as far as its task has said."""
        return "started_at" in self.outcome

    @property
    def is_going(self) -> bool:
        """Whether it trains now."""
        return self.status == "running"

    def left(self, is_to_stop: bool) -> float | None:
        """Seconds to the job's last step, from when its progress was told; None where nothing says.

        :param is_to_stop: to where it stops in this round instead, if it does.
        """
        now = self.progress
        eta, step, total, stop = (now.get(key) for key in ("eta_seconds", "step", "total", "stops_at"))
        if eta is None or not is_to_stop or not stop or not total or total <= step:
            return None if eta is None else float(eta)
        return float(max(0.0, eta * (min(stop, total) - step) / (total - step)))

    def to_dict(self, origin: float) -> dict[str, Any]:
        """This bar as JSON-ready data; times are seconds since ``origin``."""
        a = self.assignment
        return {
            "round": self.round,
            "technique": a.technique,
            "devices": a.devices,
            "node": a.node,
            "device_ids": list(a.device_ids),
            "planned": self._planned(origin),
            "planned_start": self.planned_start - origin,
            "planned_seconds": a.seconds,
            "actual": None
            if self.start is None or self.end is None
            else [self.start - origin, self.end - origin],
            "expected_end": None if self.expected_end is None else self.expected_end - origin,
            "status": self.status,
            "going": self.is_going,
        }

    def _planned(self, origin: float) -> list[float] | None:
        """From when to when it stood in the plan: a later round's plan takes the place of what is left."""
        end = self.planned_start + self.assignment.seconds
        if self.superseded_at is not None:
            end = min(end, self.superseded_at)
        return None if end <= self.planned_start else [self.planned_start - origin, end - origin]


@dataclass
class Round:
    """One plan and what came of it.

    :param made_at: when it was made, in seconds since the epoch.
    :param outcomes: by job, of those that are not in the plan too: pruned ones.
    """

    number: int
    plan: Plan
    values: Mapping[str, Any]
    made_at: float
    bars: list[Bar]
    outcomes: Mapping[str, Mapping[str, Any]]

    def to_dict(self, origin: float) -> dict[str, Any]:
        """This round as JSON-ready data."""
        ends = [bar.end for bar in self.bars if bar.end is not None]
        is_over = bool(ends) and not any(bar.expected_end is not None for bar in self.bars)
        return {
            "number": self.number,
            "start": self.made_at - origin,
            "makespan": self.plan.makespan,
            "rung": self.rung,
            "took": max(ends) - self.began if is_over else None,
        }

    @property
    def began(self) -> float:
        """When it was made; where a job of the first round had begun before, when that did."""
        starts = [bar.start for bar in self.bars if bar.start is not None]
        return min([self.made_at, *starts]) if self.number == 1 else self.made_at

    @property
    def rung(self) -> float | None:
        """The epochs that its plan takes jobs to; None where it takes them to their end."""
        return self.values.get("rung")


def read_rounds(record: Record, group: str, now: float) -> list[Round]:
    """The sweep's rounds in order, with what came of each job.

    :param now: seconds since the epoch.
    """
    found = [
        (record.value(task.task_id, "attempt") or task.end or now, task.task_id, plan)
        for task, plan in record.all_values(record.of(group, PLAN), "plan")
        if isinstance(plan, Mapping)
    ]
    rounds: list[Round] = []
    before: dict[str, Bar] = {}
    for number, (made_at, plan_task, values) in enumerate(sorted(found, key=lambda f: f[0]), 1):
        own = plan_task.removesuffix("plan") + "train"
        train = [task for task in record.of(group, TRAIN) if task.task_id.startswith(own)]
        plan = Plan.from_dict(values)
        ordered = sorted(plan.assignments, key=lambda a: (a.start, a.job))
        outcomes = dict(_outcomes(record, train, made_at))
        bars = [Bar(number, a, outcome=outcomes.get(a.job, {}), before=before.get(a.job)) for a in ordered]
        _find_tasks(bars, train)
        for bar in bars:
            told = record.progress.get((bar.task.task_id, bar.task.map_index)) if bar.task else None
            if told is not None and told.attempt == made_at:
                bar.progress = told.now
        # In the order of their starts: who waits for a device waits for the bars before it.
        held: set[Device] = set()
        freed: dict[Device, float] = {}
        for bar in bars:
            _find_status(bar, held, freed, record.is_live, made_at, now)
            if bar.is_going:
                held.update(bar.devices)
            if bar.end is not None:
                freed.update(dict.fromkeys(bar.devices, bar.end))
        _cut_interrupted(bars)
        for bar in bars:
            bar.planned_start = made_at + bar.assignment.start
        for bar in rounds[-1].bars if rounds else ():
            bar.superseded_at = made_at
        before.update({bar.job: bar for bar in bars if bar.end is not None})
        rounds.append(Round(number, plan, values, made_at, bars, outcomes))
    for outcome in report_of(record, group).get("jobs", ()):
        last = before.get(outcome["job"])
        # It ended while no task followed it, between two rounds.
        if last is not None and last.status in ("going_on", "paused"):
            last.outcome, last.status, last.reason = outcome, outcome["status"], outcome.get("reason")
            _set_times(last)
    if rounds and record.is_live:
        _set_expected_ends(rounds[-1].bars, now)
    return rounds


def report_of(record: Record, group: str) -> Mapping[str, Any]:
    """The sweep's result; empty as long as there is none."""
    return next((value for _, value in record.all_values(record.of(group, REPORT), "return_value")), {})


def _find_tasks(bars: Sequence[Bar], train: Sequence[Task]) -> None:
    """Give each bar its task: by its name, which a task has once it has run, else by the order of mapping."""
    named = {task.name: task for task in train if task.name}
    task_ids = sorted({task.task_id for task in train})
    places = {(task.task_id, task.map_index): task for task in train}
    seen: dict[str, int] = {}
    for bar in bars:
        node = bar.assignment.node
        own = task_ids[0] if len(task_ids) == 1 else next((i for i in task_ids if i.endswith(f".{node}")), "")
        index = seen[own] = seen.get(own, -1) + 1
        placed = places.get((own, index))
        bar.task = named.get(bar.job) or (placed if placed and placed.name in (None, bar.job) else None)


def _outcomes(
    record: Record, train: Sequence[Task], made_at: float
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What the jobs of this plan came to. A plan task that was cleared leaves outcomes of the plan before."""
    for _, outcome in record.all_values(train, "outcome"):
        if isinstance(outcome, Mapping) and outcome.get("attempt") == made_at:
            yield outcome["job"], outcome


def _find_status(
    bar: Bar, held: set[Device], freed: Mapping[Device, float], is_live: bool, made_at: float, now: float
) -> None:
    """Set a bar's status, and when it ran.

    :param held: devices on which a bar ahead of this one trains.
    :param freed: when the bars ahead left their devices.
    """
    task, outcome = bar.task, bar.outcome
    if task is not None and task.state in GOING:
        if not bar.has_run and bar.devices & held:
            bar.status = "waiting for devices"
            return
        bar.status = "running"
        # A task's start is told by its node, whose clock may be another.
        began = min(now, max(made_at, task.start or now))
        bar.start = _start_of(bar, max([began, *(freed.get(device, 0.0) for device in bar.devices)]))
        bar.end = max(now, bar.start)
        bar.held = bar.end - bar.start
    elif outcome and (task is None or task.state in ENDED):
        bar.status, bar.reason = outcome["status"], outcome.get("reason")
        _set_times(bar)
    elif task is None or task.state not in ENDED:
        is_again = task is not None and task.state in ("up_for_retry", "up_for_reschedule")
        bar.status = "retrying" if is_again else "waiting" if is_live else "not run"
        bar.reason = outcome.get("reason")
        _set_times(bar)
    else:
        skipped = "skipped" if is_live else "not run"
        bar.status = skipped if task.state in NEVER_RAN else "lost"
        bar.reason = None if bar.status == skipped else untold_ends.in_words(task.state)


def _set_times(bar: Bar) -> None:
    """Set when it had its devices, in this round alone: what its outcome says is of all rounds together."""
    if bar.has_run:
        started, end = bar.outcome["started_at"], bar.outcome["ended_at"]
        seconds = bar.outcome.get("actual_seconds", end - started)
        bar.end = end
        if bar.before is None or bar.before.end is None:
            bar.start, bar.held = started, seconds
        else:
            bar.held = max(0.0, seconds - bar.before.outcome.get("actual_seconds", 0.0))
            bar.start = min(end, max(bar.before.end, end - bar.held))


def _cut_interrupted(bars: Sequence[Bar]) -> None:
    """Begin bars of jobs that were interrupted, as by a failure and another try, after the last of others
    that had their devices meanwhile: when they had them before is not known."""
    ends: dict[Device, list[float]] = {}
    for bar in sorted((bar for bar in bars if bar.end is not None), key=lambda bar: bar.end or 0.0):
        for device in bar.devices:
            ends.setdefault(device, []).append(bar.end or 0.0)
    cut = {}
    for bar in bars:
        if bar.start is None or bar.end is None or bar.held is None or bar.held >= bar.end - bar.start:
            continue
        before = ((ends[device], bisect_left(ends[device], bar.end)) for device in bar.devices)
        cut[bar.job] = max([bar.start, *(found[index - 1] for found, index in before if index)])
    for bar in bars:
        bar.start = cut.get(bar.job, bar.start)


def _start_of(bar: Bar, otherwise: float) -> float:
    """When a bar that goes on began: in the round before, an earlier try, or ``otherwise``."""
    if bar.before is not None and bar.before.end is not None:
        is_in_place = bar.before.status == "going_on" and bar.before.place == bar.place
        return bar.before.end if is_in_place else max(bar.before.end, otherwise)
    return float(bar.outcome.get("started_at", otherwise))


def _set_expected_ends(bars: Sequence[Bar], now: float) -> None:
    """Set when each bar that runs or waits will have ended, if all takes as long as planned.

    :param bars: in the order of their starts; a bar begins once those before it have left its devices.
    """
    free: dict[Device, float] = {}
    for bar in bars:
        seconds = bar.assignment.seconds
        if bar.is_going:
            left = bar.left(is_to_stop=True)
            ends = (bar.start or now) + seconds if left is None else bar.progress["time"] + left
            bar.expected_end = max(now, ends)
        elif bar.status in ("waiting", "waiting for devices", "retrying"):
            bar.expected_end = max([now, *(free.get(device, 0.0) for device in bar.devices)]) + seconds
        else:
            continue
        free.update(dict.fromkeys(bar.devices, bar.expected_end))


def finite(value: float) -> float | None:
    """``value``, or None where it is infinite, which JSON lacks."""
    return value if abs(value) != float("inf") else None
