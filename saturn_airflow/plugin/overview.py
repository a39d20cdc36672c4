"""All the page shows of a sweep at a glance, as JSON-ready data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.plugin.bars import Bar, Round, finite, read_rounds, report_of
from saturn_airflow.plugin.queries import (
    ENDED,
    LATE,
    MLFLOW_LINK,
    NEVER_RAN,
    PLAN,
    PROFILE,
    STAGES,
    TRAIN,
    TRIALS,
    Record,
    Task,
)


def sweep_page(record: Record, group: str, now: float) -> dict[str, Any]:
    """All the page shows of a sweep but the reasons behind each job's strategy.

    :param group: the sweep's task group, one of the record's.
    :param now: seconds since the epoch. In the answer, times are seconds since its ``origin``.
    """
    rounds = read_rounds(record, group, now)
    result = report_of(record, group)
    origin = rounds[0].began if rounds else record.start or now
    nodes = _nodes(rounds)
    most = _rounds_asked_for(record, group, rounds)
    stages = list(_stages(record, group, most))
    state = sweep_state(record.state, stages[-1]["state"], stages[0]["state"], bool(result))
    return {
        "state": state,
        "live": record.is_live,
        "sweep": group,
        "sweeps": record.groups,
        "origin": origin,
        "now": now - origin,
        "stages": stages,
        "rounds": [round.to_dict(origin) for round in rounds],
        "rounds_most": most,
        "nodes": nodes,
        "jobs": _jobs(record, group, rounds, result, origin),
        "totals": {
            **_totals(record, group, rounds, nodes, now, origin),
            "is_comparable": _is_comparable(rounds, state),
        },
        "best": result.get("best"),
        "compared_by": _compared_by(rounds, result),
        "champion": result.get("champion"),
        "registered": result.get("registered"),
        "profiling": next(
            (value for _, value in record.all_values(record.of(group, PLAN), "profiling")), None
        ),
        "mlflow": _mlflow(record, record.of(group, TRIALS)),
        "unreadable": _is_unreadable(record, group),
        "missing_pools": list(record.missing_pools),
        "left_out": dict(rounds[-1].values.get("left_out") or {}) if rounds else {},
    }


def sweep_state(run: str, report: str | None, trials: str | None, has_result: bool) -> str:
    """How a sweep stands, which is not how its DAG run does.

    :param run: the DAG run's state.
    :param report: the state of the report, as a task's or as a stage's; so is ``trials``.
    :param has_result: whether the report has left one.
    :returns: ``success``, ``failed``, ``skipped`` (it never began), ``cancelled`` (somebody ended it before
        it could report), or the run's state while it goes on.
    """
    if report == "failed":
        return "failed"
    if report in ("done", "success") and (has_result or run in ("queued", "running")):
        return "success"
    if trials in ("skipped", "removed"):
        return "skipped"
    return run if run in ("queued", "running") and report not in NEVER_RAN else "cancelled"


def _rounds_asked_for(record: Record, group: str, rounds: Sequence[Round]) -> int:
    """How many rounds were asked for; more where the one in reserve was needed."""
    told = rounds[0].values.get("rounds_most") if rounds else None
    return max(len(rounds), int(told or len(record.of(group, PLAN))))


def _is_comparable(rounds: Sequence[Round], state: str) -> bool:
    """Whether what all took is to be compared with the first plan: not where that was for less, or others."""
    return state != "cancelled" and all(round.rung is None for round in rounds)


def _compared_by(rounds: Sequence[Round], result: Mapping[str, Any]) -> dict[str, Any]:
    """The metric that jobs are compared by, None where that is not settled yet, and its mode."""
    said = (rounds[0].values.get("compared_by") if rounds else None) or {}
    metric = (result.get("best") or {}).get("metric") or said.get("metric")
    return {"metric": metric, "mode": said.get("mode") or "min"}


def _jobs(
    record: Record, group: str, rounds: Sequence[Round], result: Mapping[str, Any], origin: float
) -> list[dict[str, Any]]:
    """All jobs of the sweep, in the order of their start; those that were not planned last."""
    by_job: dict[str, list[Bar]] = {}
    for round in rounds:
        for bar in round.bars:
            by_job.setdefault(bar.job, []).append(bar)
    jobs = []
    for name, bars in by_job.items():
        last = next((bar for bar in reversed(bars) if bar.task and bar.status != "skipped"), bars[-1])
        told: Mapping[str, Any] = next((bar.progress for bar in reversed(bars) if bar.progress), {})
        # A round that drops a job has no place for it in its plan.
        dropped = next((o for r in rounds if (o := r.outcomes.get(name)) and o["status"] == "pruned"), None)
        jobs.append(
            {
                "name": name,
                "status": dropped["status"] if dropped else last.status,
                "reason": dropped["reason"] if dropped else last.reason or _remark(last.outcome),
                "bars": [bar.to_dict(origin) for bar in bars],
                "start": next((b.start for b in bars if b.start is not None), bars[0].planned_start) - origin,
                "planned": _planned_seconds(bars, rounds),
                "actual": sum(held) if (held := [b.held for b in bars if b.held is not None]) else None,
                "metrics": _metrics(last.outcome, told),
                "progress": _progress(told, last, origin),
                **_promise_of(name, rounds[-1], origin),
                "task": last.task and _task(last.task),
                "mlflow": _mlflow(record, [bar.task for bar in reversed(bars) if bar.task]),
            }
        )
    seen = {job["name"] for job in jobs}
    for name, status, reason in _left_out(record, group, result):
        if name not in seen:
            seen.add(name)
            task = _task(_task_to_read(record, group, name))
            jobs.append({"name": name, "status": status, "reason": reason, "bars": [], "task": task})
    return jobs


def _promise_of(job: str, last: Round, origin: float) -> dict[str, float | None]:
    """By when a job is done by its last plan, with which odds; None where that promised nothing of it."""
    promise = last.values.get("promise") or {}
    seconds = (promise.get("jobs") or {}).get(job)
    by = None if seconds is None else last.made_at + seconds - origin
    return {"by": by, "odds": promise.get("confidence")}


def _remark(outcome: Mapping[str, Any]) -> str | None:
    """What is to be said of a job though it finished."""
    if refusals := outcome.get("refusals"):
        return "; ".join(RefusedStrategy.from_dict(refusal).in_words for refusal in refusals)
    mixed: str | None = outcome.get("mixed")
    return mixed


def _planned_seconds(bars: Sequence[Bar], rounds: Sequence[Round]) -> float:
    """What the plans gave a job, those that went to a rung added up; later plans have what was left of it."""
    seconds = 0.0
    for bar in bars:
        seconds += bar.assignment.seconds
        if rounds[bar.round - 1].rung is None:
            break
    return seconds


def _metrics(outcome: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The last value of each metric: of the outcome, else of what was told while the job trained."""
    found = {"loss": told.get("loss"), **(told.get("metrics") or {})}
    ended = {name: outcome.get(name) for name in ("loss", "epoch_loss", "eval_loss")}
    ended |= outcome.get("metrics") or {}
    found |= {name: value for name, value in ended.items() if value is not None}
    return {name: value for name, value in found.items() if value is not None}


def _progress(told: Mapping[str, Any], last: Bar, origin: float) -> dict[str, Any] | None:
    """How far a job has come; ``ends`` is when it is done, where that is known, and it trains now."""
    if not told:
        return None
    left = last.left(is_to_stop=False)
    ends = told["time"] + left - origin if last.is_going and left is not None else None
    shown = ("step", "total", "stops_at", "epoch", "samples_per_second")
    return {**{key: told.get(key) for key in shown}, "at": told["time"] - origin, "ends": ends}


def _task_to_read(record: Record, group: str, job: str) -> Task:
    """The task whose log says most of a job that was not planned: a trial of it that failed, or the plan."""
    trials = [t for t in record.of(group, PROFILE) if (t.name or "").startswith(f"{job} ")]
    trials.sort(key=lambda task: task.state == "failed")
    return [*record.of(group, PLAN)[:1], *trials][-1]


def _task(task: Task) -> dict[str, Any]:
    """What a link to the task's log is made of."""
    return {"id": task.task_id, "map_index": task.map_index, "try_number": task.try_number}


def _left_out(record: Record, group: str, result: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """Jobs that may be in no plan, each with its status and the reason: a job may come more than once."""
    for _, unplanned in record.all_values(record.of(group, PLAN), "unplanned"):
        for entry in unplanned:
            yield entry["job"], "not planned", entry.get("reason")
    for outcome in result.get("jobs", ()):
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


def _expected_late(record: Record, group: str, last: Round) -> float | None:
    """When all is done, in seconds since the epoch, where others break the deadline that the plan kept.

    The plan has looked first, then whoever trained its jobs; what was found last counts.
    """
    newest, expected = last.made_at, last.values.get("expected_late")
    for _, told in record.all_values(record.of(group, TRAIN), LATE):
        if told["time"] > newest:
            newest, expected = told["time"], told["expected"]
    return None if expected is None else float(expected)


def _totals(
    record: Record,
    group: str,
    rounds: Sequence[Round],
    nodes: Sequence[Mapping[str, Any]],
    now: float,
    origin: float,
) -> dict[str, Any]:
    """The figures above the chart: what was planned first, what is promised, and what it came to so far.

    :param now: seconds since the epoch, as is ``origin``; in the answer, times are seconds since ``origin``.
    """
    devices = sum(node["devices"] for node in nodes)
    if not rounds:
        return {"devices": devices}
    first, last = rounds[0], rounds[-1]
    bars = [bar for round in rounds for bar in round.bars]
    ran = [bar for bar in bars if bar.start is not None and bar.end is not None]
    ends = [bar.end for bar in ran if bar.end is not None]
    ends_later = any(bar.expected_end is not None for bar in last.bars)
    elapsed = (now if ends_later else max(ends)) - origin if ran else None
    busy = sum((bar.held or 0.0) * bar.assignment.devices for bar in ran)
    planned = sum(a.seconds * a.devices for a in first.plan.assignments)
    expected = [bar.expected_end - origin for bar in last.bars if bar.expected_end is not None]
    deadline, promise = last.values.get("deadline"), last.values.get("promise") or {}
    promised, late = promise.get("seconds"), _expected_late(record, group, last)
    return {
        "devices": devices,
        "objective": first.plan.objective,
        "value": first.plan.value,
        "value_bound": first.plan.value_bound,
        "deadline": deadline and {"at": deadline["at"] - origin, "planned": deadline["planned"]},
        "expected_late": None if late is None else late - origin,
        "breaks": [
            {key: None if at is None else at - origin for key, at in broken.items()}
            for broken in last.values.get("breaks") or ()
        ],
        "promise": {
            "confidence": promise.get("confidence"),
            "at": None if promised is None else last.made_at + promised - origin,
            "why": promise.get("why"),
            "odds": promise.get("odds"),
        },
        "makespan": first.plan.makespan,
        "lower_bound": first.plan.lower_bound,
        "gap": finite(first.plan.gap),
        "current_practice": first.values.get("current_practice"),
        "planned_utilisation": _share(planned, first.plan.makespan * devices),
        "elapsed": elapsed,
        "goes_on": ends_later,
        "expected": max(expected, default=None),
        "utilisation": _share(busy, (elapsed or 0.0) * devices),
    }


def _stages(record: Record, group: str, most: int) -> Iterator[dict[str, Any]]:
    """Where the sweep stands: each stage with its state, and how many of its tasks have ended.

    :param most: the rounds that were asked for; one more that has not begun keeps nothing waiting.
    """
    reserve = f"{group}.round_{most + 1}."
    for stage in STAGES:
        tasks = [t for t in record.of(group, stage) if t.state or not t.task_id.startswith(reserve)]
        states = {task.state for task in tasks}
        if not states - {None}:
            state = "waiting"
        elif not states <= set(ENDED):
            state = "running"
        elif "failed" in states:
            state = "failed"
        else:
            state = "skipped" if states <= NEVER_RAN else "done"
        mapped = [task.state in ENDED for task in tasks if task.map_index >= 0]
        yield {
            "name": stage,
            "state": state,
            "done": sum(mapped),
            "all": len(mapped),
            "task": _task_of_stage(tasks),
        }


def _task_of_stage(tasks: Sequence[Task]) -> dict[str, Any] | None:
    """The task whose log says most of a stage: the first that failed, else the one that began last.

    :returns: as :func:`_task`, with a map index of None for all instances, where none of several stands out;
        None where no task has begun.
    """
    # Airflow notes when it skipped a task as its start.
    ran = [task for task in tasks if task.start is not None and task.state not in NEVER_RAN]
    begun = sorted(ran, key=lambda task: task.start or 0.0)
    if failed := [task for task in begun if task.state == "failed"]:
        return _task(failed[0])
    if not begun:
        return None
    last = begun[-1]
    alone = sum(task.task_id == last.task_id for task in tasks) == 1
    return {**_task(last), "map_index": last.map_index if alone else None}


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
    """``part / whole``; None of nothing."""
    return part / whole if whole else None
