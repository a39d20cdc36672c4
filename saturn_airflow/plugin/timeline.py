"""What a sweep looks like on its page: planned and actual bars, states, totals. Data in, data out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.plan import Assignment, Plan
from saturn_airflow.plugin.reading import MLFLOW_LINK, PLAN, PROFILE, REPORT, TRAIN, TRIALS, Record, Task

ENDED = ("success", "failed", "upstream_failed", "skipped", "removed")
GOING = ("running", "deferred")
STAGES = (("trials", TRIALS), ("profile", PROFILE), ("plan", PLAN), ("train", TRAIN), ("report", REPORT))


@dataclass
class Bar:
    """One job in one round: where it was to run, where and when it did. Times are seconds since the epoch.

    :param held: seconds it had its devices; less than from start to end where it was interrupted.
    """

    round: int
    position: int
    assignment: Assignment
    planned_start: float
    superseded_at: float | None = None
    task: Task | None = None
    outcome: Mapping[str, Any] = field(default_factory=dict)
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

    @property
    def devices(self) -> set[tuple[str, int]]:
        """The devices it was given."""
        return {(self.assignment.node, device) for device in self.assignment.device_ids}

    @property
    def is_going(self) -> bool:
        """Whether its task is running."""
        return self.task is not None and self.task.state in GOING

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
            "held": self.held,
            "status": self.status,
            "going": self.is_going and self.start is not None,
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
    :param zero: when its seconds began to count: at the first round's first job, at a later round's plan.
    """

    number: int
    plan: Plan
    values: Mapping[str, Any]
    made_at: float
    zero: float
    bars: list[Bar]

    def to_dict(self, origin: float) -> dict[str, Any]:
        """This round as JSON-ready data."""
        plan = self.plan
        return {
            "number": self.number,
            "start": self.zero - origin,
            "makespan": plan.makespan,
            "lower_bound": plan.lower_bound,
            "gap": _finite(plan.gap),
            "objective": plan.objective,
            "planning_seconds": plan.seconds,
            "current_practice": self.values.get("current_practice"),
        }


def sweep_page(record: Record, group: str, now: float) -> dict[str, Any]:
    """All the page shows of a sweep but the reasons behind each job's strategy.

    :param group: the sweep's task group, one of the record's.
    :param now: seconds since the epoch. In the answer, times are seconds since its ``origin``.
    """
    rounds = read_rounds(record, group, now)
    result = next((value for _, value in record.all_values(record.of(group, REPORT), "return_value")), None)
    origin = rounds[0].zero if rounds else record.start or now
    bars = [bar for round in rounds for bar in round.bars]
    nodes = _nodes(rounds)
    jobs = _jobs(record, group, bars, result, origin)
    return {
        "dag_id": record.dag_id,
        "run_id": record.run_id,
        "state": record.state,
        "live": record.state in ("queued", "running"),
        "sweep": group,
        "sweeps": record.groups,
        "origin": origin,
        "now": now - origin,
        "stages": list(_stages(record, group)),
        "rounds": [round.to_dict(origin) for round in rounds],
        "nodes": nodes,
        "jobs": jobs,
        "totals": _totals(rounds, nodes, result, now, origin),
        "best": (result or {}).get("best"),
        "profiling": next(
            (value for _, value in record.all_values(record.of(group, PLAN), "profiling")), None
        ),
        "mlflow": _mlflow(record, record.of(group, TRIALS)),
        "unreadable": _is_unreadable(record, group),
    }


def read_rounds(record: Record, group: str, now: float) -> list[Round]:
    """The sweep's rounds in order, with what came of each job."""
    found = [
        (record.value(task.task_id, "attempt") or task.end or now, task.task_id, plan)
        for task, plan in record.all_values(record.of(group, PLAN), "plan")
        if isinstance(plan, Mapping)
    ]
    rounds: list[Round] = []
    for number, (made_at, plan_task, values) in enumerate(sorted(found, key=lambda f: f[0]), 1):
        train = [
            t
            for t in record.of(group, TRAIN)
            if t.task_id.startswith(plan_task.removesuffix("plan") + "train")
        ]
        plan = Plan.from_dict(values)
        ordered = sorted(plan.assignments, key=lambda a: (a.start, a.job))
        bars = [Bar(number, position, a, 0.0) for position, a in enumerate(ordered)]
        _find_tasks(bars, record, train)
        outcomes = dict(_outcomes(record, train, made_at))
        for bar in bars:
            bar.outcome = outcomes.get(bar.job, {})
        _settle(bars, record, now)
        starts = [bar.start for bar in bars if bar.start is not None]
        zero = min(starts) if starts and number == 1 else made_at
        for bar in bars:
            bar.planned_start = zero + bar.assignment.start
        for bar in rounds[-1].bars if rounds else ():
            bar.superseded_at = made_at
        rounds.append(Round(number, plan, values, made_at, zero, bars))
    if rounds and record.state in ("queued", "running"):
        _expect(rounds[-1].bars, now)
    return rounds


def _find_tasks(bars: Sequence[Bar], record: Record, train: Sequence[Task]) -> None:
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
    """What the jobs of the plan that was made then came to."""
    for _, outcome in record.all_values(train, "outcome"):
        if isinstance(outcome, Mapping) and outcome.get("attempt") == made_at:
            yield outcome["job"], outcome


def _settle(bars: Sequence[Bar], record: Record, now: float) -> None:
    """Find out how each bar stands and when it ran; an earlier bar on the same devices goes first."""
    for bar in bars:
        task, outcome = bar.task, bar.outcome
        before = [b for b in bars[: bar.position] if b.devices & bar.devices]
        if task is not None and task.state not in ENDED:
            if task.state in GOING:
                if not outcome.get("started_at") and any(b.is_going and b.start is not None for b in before):
                    bar.status = "waiting for devices"
                    continue
                bar.status = "running"
                freed = [b.end for b in before if b.end is not None]
                bar.start = outcome.get("started_at") or max([task.start or now, *freed])
                bar.end = max(now, bar.start)
                bar.held = bar.end - bar.start
            else:
                bar.status = "retrying" if task.state in ("up_for_retry", "up_for_reschedule") else "waiting"
                bar.reason = outcome.get("reason")
                _ran(bar)
        elif outcome:
            bar.status, bar.reason = outcome["status"], outcome.get("reason")
            _ran(bar)
        elif task is None or task.state is None:
            bar.status = "waiting" if record.state in ("queued", "running") else "not run"
        else:
            bar.status = "skipped" if task.state in ("skipped", "removed") else "lost"
            bar.reason = "its train task left no outcome; the log says why"


def _ran(bar: Bar) -> None:
    outcome = bar.outcome
    if "started_at" in outcome:
        bar.start, bar.end = outcome["started_at"], outcome["ended_at"]
        bar.held = outcome.get("actual_seconds")


def _expect(bars: Sequence[Bar], now: float) -> None:
    """When what is left will have ended if all takes as long as planned."""
    free: dict[tuple[str, int], float] = {}
    for bar in bars:
        seconds = bar.assignment.seconds
        if bar.is_going and bar.start is not None:
            bar.expected_end = max(now, bar.start + seconds)
        elif bar.status in ("waiting", "waiting for devices", "retrying"):
            bar.expected_end = max([now, *(free.get(device, 0.0) for device in bar.devices)]) + seconds
        else:
            continue
        free.update(dict.fromkeys(bar.devices, bar.expected_end))


def _jobs(
    record: Record, group: str, bars: Sequence[Bar], result: Mapping[str, Any] | None, origin: float
) -> list[dict[str, Any]]:
    """All jobs of the sweep, in the order of their start; those that were not planned last."""
    by_job: dict[str, list[Bar]] = {}
    for bar in bars:
        by_job.setdefault(bar.job, []).append(bar)
    jobs = []
    for name, own in by_job.items():
        last = next(
            (bar for bar in reversed(own) if bar.task is not None and bar.status != "skipped"), own[-1]
        )
        task = last.task
        jobs.append(
            {
                "name": name,
                "status": last.status,
                "reason": last.reason,
                "bars": [bar.to_dict(origin) for bar in own],
                "loss": last.outcome.get("loss"),
                "eval_loss": last.outcome.get("eval_loss"),
                "task": task
                and {"id": task.task_id, "map_index": task.map_index, "try_number": task.try_number},
                "mlflow": task and _mlflow(record, [task]),
            }
        )
    told = {job["name"] for job in jobs}
    for name, status, reason in _left_out(record, group, result):
        if name not in told:
            told.add(name)
            jobs.append({"name": name, "status": status, "reason": reason, "bars": []})
    return jobs


def _left_out(
    record: Record, group: str, result: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, str | None]]:
    for _, unplanned in record.all_values(record.of(group, PLAN), "unplanned"):
        for entry in unplanned:
            yield entry["job"], "not planned", entry.get("reason")
    for outcome in (result or {}).get("jobs", ()):
        yield outcome["job"], outcome["status"].replace("_", " "), outcome.get("reason")


def _nodes(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """The nodes with how many devices each has; where the plan does not say, with those that it uses."""
    devices: dict[str, int] = {}
    for round in rounds:
        for node in round.values.get("nodes") or ():
            devices[node["name"]] = max(node["devices"], devices.get(node["name"], 0))
        for bar in round.bars:
            node, ids = bar.assignment.node, bar.assignment.device_ids
            devices[node] = max([devices.get(node, 0), *(device + 1 for device in ids)])
    return [{"name": name, "devices": devices[name]} for name in devices]


def _totals(
    rounds: Sequence[Round],
    nodes: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
    now: float,
    origin: float,
) -> dict[str, Any]:
    devices = sum(node["devices"] for node in nodes)
    totals: dict[str, Any] = {"devices": devices}
    if not rounds:
        return totals
    first, last = rounds[0], rounds[-1]
    bars = [bar for round in rounds for bar in round.bars]
    ran = [bar for bar in bars if bar.start is not None and bar.end is not None]
    ends = [bar.end for bar in ran if bar.end is not None]
    ends_later = any(bar.expected_end is not None for bar in last.bars)
    elapsed = (now if ends_later else max(ends)) - origin if ran else None
    busy = sum((bar.held or 0.0) * bar.assignment.devices for bar in ran)
    planned = sum(a.seconds * a.devices for a in first.plan.assignments)
    expected = [bar.expected_end - origin for bar in last.bars if bar.expected_end is not None]
    return {
        **totals,
        "makespan": first.plan.makespan,
        "lower_bound": first.plan.lower_bound,
        "gap": _finite(first.plan.gap),
        "current_practice": first.values.get("current_practice"),
        "planning_seconds": sum(round.plan.seconds for round in rounds),
        "planned_utilisation": _share(planned, first.plan.makespan * devices),
        "elapsed": elapsed,
        "expected": max(expected, default=None),
        "utilisation": _share(busy, (elapsed or 0.0) * devices),
        "estimate_error_median": (result or {}).get("estimate_error_median"),
    }


def _stages(record: Record, group: str) -> Iterator[dict[str, Any]]:
    """Where the sweep stands: each stage with its state, and how many of its tasks have ended."""
    for stage, operator in STAGES:
        tasks = record.of(group, operator)
        states = [task.state for task in tasks]
        ended = sum(state in ENDED for state in states)
        if {"failed", "upstream_failed"} & set(states):
            state = "failed"
        elif tasks and ended == len(tasks):
            state = "skipped" if set(states) <= {"skipped", "removed"} else "done"
        elif any(state is not None for state in states):
            state = "running"
        else:
            state = "waiting"
        if state == "failed" and ended < len(tasks):
            state = "running"
        mapped = [task for task in tasks if task.map_index >= 0]
        yield {"name": stage, "state": state, "done": ended if mapped else None, "all": len(mapped) or None}


def _mlflow(record: Record, tasks: Sequence[Task]) -> str | None:
    """The address of the MLflow run that the task told Airflow of, if it is one to link to."""
    for _, url in record.all_values(tasks, MLFLOW_LINK):
        if isinstance(url, str) and url.startswith(("http://", "https://")):
            return url
    return None


def _is_unreadable(record: Record, group: str) -> bool:
    """Whether the plan is there, but kept elsewhere by a custom XCom backend."""
    return any(not isinstance(plan, Mapping) for _, plan in record.all_values(record.of(group, PLAN), "plan"))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") else None
