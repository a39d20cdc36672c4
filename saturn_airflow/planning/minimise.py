"""How a solve spends its time: which bound and which search when."""

from __future__ import annotations

from collections.abc import Callable

from saturn_airflow.model.errors import MissedDeadlineError
from saturn_airflow.planning import warming
from saturn_airflow.planning.clock import Clock, LookClock
from saturn_airflow.planning.exact_search import sharings
from saturn_airflow.planning.exact_search.proofs import Climb, Descent, Proof
from saturn_airflow.planning.heuristics.list_scheduling import first_come, list_schedule
from saturn_airflow.planning.heuristics.portfolio import Portfolio
from saturn_airflow.planning.heuristics.search import Searcher
from saturn_airflow.planning.incumbent import Incumbent, SolveProgress
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Schedule
from saturn_airflow.planning.lower_bounds.area import mean_completion_bound, simple_bound
from saturn_airflow.planning.objectives import DEVICE_TIME, MAKESPAN, PlanObjective

#: Shares of the time limit: list scheduling at most; the search for a good plan before costly bounds (and its
#: most seconds); a bound from fractions of jobs; one from whole jobs (branch and bound).
_BY_LISTS = 0.1
_SEARCH_FIRST = 0.15
_SEARCH_FIRST_MOST = 2.0
_BY_FRACTIONS = 0.2
_BY_WHOLE_JOBS = 0.2
#: Share of the time left then: exact proofs, or the first plan that meets a deadline.
_PROOF = 0.6
#: Seconds after which the next of several proofs has its turn.
_SLICE = 0.2


def minimise_makespan(best: Incumbent, seed: int, processes: int, carried: Schedule | None) -> None:
    """Improve ``best`` until it is proven good enough or the time is up.

    First what takes milliseconds (area bound, list scheduling), then by turns a stronger bound and a search,
    each within its share of the time.

    :param seed: of all searches.
    :param processes: how many search, this one included.
    :param carried: a schedule that is known already, such as that of the plan before.
    """
    instance, clock = best.instance, best.clock
    best.raise_bound(simple_bound(instance))
    if carried is not None:
        best.offer(carried)
    best.offer(list_schedule(instance, best.bound, clock.within(clock.limit * _BY_LISTS)))
    if best.done:
        return
    small = sharings.is_small(instance)
    with Portfolio(best, processes - 1, seed, exactly=small) as portfolio:
        searcher = Searcher(best, seed, portfolio.exchange)
        portfolio.exchange()
        if isinstance(clock, LookClock):
            searcher.run(clock)
            return
        # HiGHS and Pyomo are imported here: a solve that needs no model does without them. And before the
        # thread that compiles begins, see :func:`warming.start`.
        from saturn_airflow.planning.lower_bounds import destructive, relaxation

        warming.start()
        best.raise_bound(relaxation.bound(instance, clock.within(clock.limit * _BY_FRACTIONS), relaxed=True))
        portfolio.exchange()
        searcher.run(clock.within(min(_SEARCH_FIRST_MOST, clock.limit * _SEARCH_FIRST)))
        if best.done:
            return
        # Where exact proofs follow, they get a better bound of the same time.
        by_fractions = clock.within(clock.limit * (_BY_FRACTIONS / 2 if small else _BY_FRACTIONS))
        best.raise_bound(destructive.bisect(instance, best.bound, best.value, by_fractions, steps=10))
        portfolio.exchange()
        if small and warming.wait(clock):
            _prove(best, clock if portfolio.members else clock.within(clock.left * _PROOF), portfolio)
        elif not best.done:
            whole = clock.within(clock.limit * _BY_WHOLE_JOBS)
            best.raise_bound(destructive.bisect(instance, best.bound, best.value, whole, steps=8, whole=True))
        portfolio.exchange()
        searcher.run(clock)


def _prove(best: Incumbent, clock: Clock, portfolio: Portfolio) -> None:
    """Raise the bound step by step, and ask whether anything ends earlier than the best, by turns.

    Where other processes search too, the second is what the first of them does.
    """
    proofs: list[Proof] = [Climb(best)] if portfolio.members else [Descent(best), Climb(best)]
    while not (best.done or clock.expired):
        open_ones = [proof for proof in proofs if not proof.over]
        if not open_ones:
            return
        for proof in open_ones:
            proof.run(clock.within(_SLICE))
            portfolio.exchange()


def minimise_other(
    instance: Instance,
    aim: PlanObjective,
    clock: Clock,
    gap: float,
    seed: int,
    processes: int,
    carried: Schedule | None,
    on_progress: Callable[[SolveProgress], None] | None,
) -> tuple[Incumbent, float]:
    """The best found for another objective than the makespan, and a lower bound of the makespan, in seconds.

    :param aim: the objective.
    :param gap: at which to stop, as a share.
    :raises MissedDeadlineError: when the deadline can't be met, or no plan that meets it was found.
    """
    best = Incumbent(instance, aim, clock, gap, on_progress)
    bound = simple_bound(instance)
    if carried is not None:
        best.offer(carried)
    if aim.name == DEVICE_TIME:
        _meet_deadline(best, aim, seed, processes)
    else:
        best.offer(first_come(instance, shortest_first=True))
        best.offer(list_schedule(instance, bound, clock.within(clock.limit * _BY_LISTS)))
        best.raise_bound(mean_completion_bound(instance))
    with Portfolio(best, processes - 1, seed) as portfolio:
        portfolio.exchange()
        Searcher(best, seed, portfolio.exchange).run(clock)
    return best, bound


def _meet_deadline(best: Incumbent, aim: PlanObjective, seed: int, processes: int) -> None:
    """Bound the device-time, and find a first plan in time by minimising the makespan until it is.

    :raises MissedDeadlineError: where there is none, or none was found.
    """
    from saturn_airflow.planning.lower_bounds import destructive

    instance, clock = best.instance, best.clock
    least = destructive.least_area(instance, aim.deadline, clock.within(clock.limit * _BY_FRACTIONS))
    if least is None:
        raise MissedDeadlineError(
            f"no plan can end by {aim.deadline:g} s: the longest job, or all jobs together, take longer. "
            "Give a later deadline or more devices"
        )
    best.raise_bound(least)
    fast = Incumbent(
        instance, PlanObjective(MAKESPAN), clock.within(clock.left * _PROOF), target=aim.deadline
    )
    if best.schedule:
        return
    minimise_makespan(fast, seed, processes, None)
    if not best.offer(fast.schedule):
        raise MissedDeadlineError(
            f"no plan was found that ends by {aim.deadline:g} s; the best ends after {fast.value:g} s. "
            "Give a later deadline, more devices, or a longer time limit"
        )
