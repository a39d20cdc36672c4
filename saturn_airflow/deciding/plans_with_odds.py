"""Plans that are done by a deadline with a probability that was asked for."""

from __future__ import annotations

from collections.abc import Callable

from saturn_airflow.model.errors import MissedDeadlineError
from saturn_airflow.model.settings import DEVICE_TIME, MAKESPAN
from saturn_airflow.planning.online.adoption import Adoption
from saturn_airflow.planning.online.ends import PlanEnds

#: A plan with odds takes up to so many searches, which share the time for planning.
SEARCHES = 4
#: Of what a search may take, the share that the next one is given less, beside what it was late.
_LESS = 0.01

Make = Callable[[str, float | None], Adoption]


def in_time_with_odds(
    make: Make, ends: Callable[[Adoption], PlanEnds] | None, left: float, confidence: float
) -> tuple[Adoption, str | None]:
    """The thriftiest plan found that ends by the deadline with the odds ``confidence``.

    A plan for the deadline itself ends later as often as not. So it is made for an earlier moment: earlier by
    the factor that the promise of the one before was late.

    :param make: plans for an objective and the seconds until the deadline.
    :param ends: when a plan may end; None where nothing is known of that, and all is planned to end as early
        as possible.
    :param left: seconds until the deadline.
    :returns: the plan, and None; or the plan that ends as early as possible, and why none is in time.
    """
    if ends is not None:
        target = left
        for search in range(1, SEARCHES):
            try:
                found = make(DEVICE_TIME, target)
            except MissedDeadlineError:
                break
            by = ends(found).sweep.by(confidence)
            if by <= left:
                return found, None
            target = min(target, found.plan.makespan) * left / by * (1 - search * _LESS)
    found = make(MAKESPAN, None)
    if ends is None:
        late = found.plan.makespan > left
        return found, f"the earliest end is {found.plan.makespan - left:.0f} s after it" if late else None
    told = ends(found).sweep
    if told.by(confidence) <= left:
        return found, None
    return found, f"it is met with odds of {told.odds(left):.0%}, and was to be with {confidence:.0%}"
