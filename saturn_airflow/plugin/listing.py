"""The list of sweeps, as JSON-ready data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saturn_airflow.plugin.overview import sweep_state

#: Keys of a sweep that the list is made from and does not show.
_NOT_SHOWN = ("report", "trials", "tasks", "failed", "pruned", "jobs", "rung", "not_planned")


def listed(sweeps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the list shows of each sweep: its state, and ``jobs``, how many of them have which fate.

    :param sweeps: as :func:`~saturn_airflow.plugin.latest_sweeps.read_sweeps` returns them.
    """
    return [
        {
            **{key: value for key, value in sweep.items() if key not in _NOT_SHOWN},
            "state": _state(sweep),
            "jobs": _jobs(sweep),
            "is_comparable": sweep.get("rung") is None,
        }
        for sweep in sweeps
    ]


def _state(sweep: Mapping[str, Any]) -> str:
    """See :func:`~saturn_airflow.plugin.overview.sweep_state`."""
    has_result = "actual_seconds" in sweep
    return sweep_state(sweep["state"], sweep.get("report"), sweep["trials"], has_result)


def _jobs(sweep: Mapping[str, Any]) -> dict[str, int]:
    """How many jobs there are in ``all``, and how many have which fate, as far as that is known.

    Of a sweep with rounds that goes on, ``round`` says which its numbers are of.
    """
    rounds = sorted(sweep["tasks"], key=lambda name: int(name.partition("_")[2] or 0))
    states = sweep["tasks"][rounds[-1]] if rounds else {}
    mapped = sum(states.values())
    left_out = sweep.get("not_planned") or 0
    found = {"all": sweep.get("jobs") or mapped + left_out, "not_planned": left_out}
    if sweep.get("failed") is not None:
        pruned = len(sweep.get("pruned") or ())
        failed = len(sweep["failed"])
        found["all"] = sweep.get("jobs") or max(mapped, failed + pruned)
        found |= {"pruned": pruned, "failed": max(0, failed - left_out)}
        return {**found, "finished": found["all"] - pruned - failed}
    if rounds and rounds[-1]:
        found |= {"round": int(rounds[-1].partition("_")[2]), "all": mapped, "not_planned": 0}
    is_cancelled = _state(sweep) == "cancelled"
    failed = states.get("failed", 0) + states.get("upstream_failed", 0)
    return {**found, "finished": states.get("success", 0), "stopped" if is_cancelled else "failed": failed}
