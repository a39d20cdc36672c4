"""Deadlines that are expected to be missed, and the sweeps without which they would be kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from saturn_airflow.model.sharing import SharedCluster, SharedSweep, SharingRules
from saturn_airflow.sharing.forecast import plan_together
from saturn_airflow.sharing.outlook import goes_before

#: Of so many other sweeps it is looked whether one alone breaks a deadline, and of so many for all deadlines
#: together: each is a forecast of all.
_MOST, _MOST_FOR_ALL = 8, 12


@dataclass(frozen=True)
class LateDeadline:
    """A deadline that is expected to be missed. Seconds of the cluster's clock.

    :param end: when its sweep is expected to be done; infinite where a job of it fits on no node.
    :param without: by sweep that breaks it, when this one would be done if that were not there.
    """

    sweep: str
    deadline: float
    end: float
    without: Mapping[str, float]


def late(
    cluster: SharedCluster,
    rules: SharingRules,
    ends: Mapping[str, float] | None = None,
    *,
    of: Collection[str] | None = None,
    suspects: Collection[str] | None = None,
) -> list[LateDeadline]:
    """The deadlines that are expected to be missed, of those that have not passed.

    :param ends: when sweeps are expected to be done, where that is known already.
    :param of: only those of these sweeps.
    :param suspects: only of these it is looked whether they break one; else of those first that go before.
    :raises AssertionError: when what is expected never ends, which is a mistake of Saturn's.
    """
    asked = [sweep for sweep in cluster.sweeps if of is None or sweep.name in of]
    due = [sweep for sweep in asked if sweep.deadline is not None and sweep.deadline > cluster.now]
    if not due:
        return []
    ends = plan_together(cluster, rules).sweeps if ends is None else ends
    forecasts: dict[str, Mapping[str, float]] = {}
    found = []
    for sweep in due:
        assert sweep.deadline is not None
        end = ends.get(sweep.name, math.inf)
        if end <= sweep.deadline:
            continue
        without = {}
        for other in _suspects(cluster, rules, sweep, suspects):
            if other not in forecasts:
                if len(forecasts) >= _MOST_FOR_ALL:
                    continue
                rest = tuple(one for one in cluster.sweeps if one.name != other)
                forecasts[other] = plan_together(replace(cluster, sweeps=rest), rules).sweeps
            if (instead := forecasts[other].get(sweep.name, math.inf)) <= sweep.deadline:
                without[other] = instead
        found.append(LateDeadline(sweep.name, sweep.deadline, end, without))
    return found


def _suspects(
    cluster: SharedCluster, rules: SharingRules, sweep: SharedSweep, only: Collection[str] | None
) -> list[str]:
    """The sweeps that may break the deadline of ``sweep``: who goes before it, then who came last."""
    before = list(goes_before(cluster, rules, sweep))
    others = sorted((s for s in cluster.sweeps if s.name != sweep.name), key=lambda s: (-s.arrived, s.name))
    order = [*before, *(other.name for other in others if other.name not in before)]
    return [name for name in order if only is None or name in only][:_MOST]
