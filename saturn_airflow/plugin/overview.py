"""All the page shows of a sweep at a glance, as JSON-ready data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from saturn_airflow.plugin.bars import Bar, Round, finite, read_rounds, report_of
from saturn_airflow.plugin.queries import ENDED, MLFLOW_LINK, PLAN, STAGES, TRIALS, Record, Task


def sweep_page(record: Record, group: str, now: float) -> dict[str, Any]:
    """All the page shows of a sweep but the reasons behind each job's strategy.

    :param group: the sweep's task group, one of the record's.
    :param now: seconds since the epoch. In the answer, times are seconds since its ``origin``.
    """
    rounds = read_rounds(record, group, now)
    result = report_of(record, group)
    origin = rounds[0].zero if rounds else record.start or now
    nodes = _nodes(rounds)
    stages = list(_stages(record, group))
    return {
        "state": sweep_state(record.state, stages[-1]["state"]),
        "live": record.is_live,
        "sweep": group,
        "sweeps": record.groups,
        "origin": origin,
        "now": now - origin,
        "stages": stages,
        "rounds": [round.to_dict(origin) for round in rounds],
        "nodes": nodes,
        "jobs": _jobs(record, group, rounds, result, origin),
        "totals": _totals(rounds, nodes, now, origin),
        "best": result.get("best"),
        "profiling": next(
            (value for _, value in record.all_values(record.of(group, PLAN), "profiling")), None
        ),
        "mlflow": _mlflow(record, record.of(group, TRIALS)),
        "unreadable": _is_unreadable(record, group),
        "left_out": dict(rounds[-1].values.get("left_out") or {}) if rounds else {},
    }


def sweep_state(run: str, report: str | None) -> str:
    """How a sweep stands, which is not how its DAG run does.

    :param run: the DAG run's state.
    :param report: the state of the report, as a task's or as a stage's.
    """
    ended = {"done": "success", "success": "success", "failed": "failed", "upstream_failed": "failed"}
    return ended.get(report or "", "skipped" if report == "skipped" else run)


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
        # A round that drops a job has no place for it in its plan.
        dropped = next((o for r in rounds if (o := r.outcomes.get(name)) and o["status"] == "pruned"), None)
        jobs.append(
            {
                "name": name,
                "status": dropped["status"] if dropped else last.status,
                "reason": dropped["reason"] if dropped else last.reason,
                "bars": [bar.to_dict(origin) for bar in bars],
                "start": next((b.start for b in bars if b.start is not None), bars[0].planned_start) - origin,
                # Later plans have what was left of it.
                "planned": bars[0].assignment.seconds,
                "actual": sum(held) if (held := [b.held for b in bars if b.held is not None]) else None,
                "loss": last.outcome.get("loss"),
                "eval_loss": last.outcome.get("eval_loss"),
                "metrics": last.outcome.get("metrics") or {},
                "task": last.task and _task(last.task),
                "mlflow": _mlflow(record, [bar.task for bar in reversed(bars) if bar.task]),
            }
        )
    told = {job["name"] for job in jobs}
    for name, status, reason in _left_out(record, group, result):
        if name not in told:
            told.add(name)
            jobs.append({"name": name, "status": status, "reason": reason, "bars": []})
    return jobs


def _task(task: Task) -> dict[str, Any]:
    return {"id": task.task_id, "map_index": task.map_index, "try_number": task.try_number}


def _left_out(record: Record, group: str, result: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
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


def _totals(
    rounds: Sequence[Round], nodes: Sequence[Mapping[str, Any]], now: float, origin: float
) -> dict[str, Any]:
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
    deadline = last.values.get("deadline")
    return {
        "devices": devices,
        "objective": first.plan.objective,
        "value": first.plan.value,
        "value_bound": first.plan.value_bound,
        "deadline": deadline and {"at": deadline["at"] - origin, "planned": deadline["planned"]},
        "makespan": first.plan.makespan,
        "lower_bound": first.plan.lower_bound,
        "gap": finite(first.plan.gap),
        "current_practice": first.values.get("current_practice"),
        "planned_utilisation": _share(planned, first.plan.makespan * devices),
        "elapsed": elapsed,
        "expected": max(expected, default=None),
        "utilisation": _share(busy, (elapsed or 0.0) * devices),
    }


def _stages(record: Record, group: str) -> Iterator[dict[str, Any]]:
    """Where the sweep stands: each stage with its state, and how many of its tasks have ended."""
    for stage in STAGES:
        tasks = record.of(group, stage)
        states = {task.state for task in tasks}
        if not states - {None}:
            state = "waiting"
        elif not states <= set(ENDED):
            state = "running"
        elif {"failed", "upstream_failed"} & states:
            state = "failed"
        else:
            state = "skipped" if states <= {"skipped", "removed"} else "done"
        mapped = [task.state in ENDED for task in tasks if task.map_index >= 0]
        yield {"name": stage, "state": state, "done": sum(mapped), "all": len(mapped)}


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
