"""The plan of a round where other sweeps are active on its nodes."""

from __future__ import annotations

from saturn_airflow.deciding.next_round import (
    DecidedRound,
    SweepState,
    checkpoint_seconds,
    length_of,
    seen_where_they_run,
)
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.sharing import SharedCluster, SharedSweep, SharingRules
from saturn_airflow.planning.online.execution import Situation
from saturn_airflow.sharing.among import ends_among, plan_among, waiting_as_planned
from saturn_airflow.sharing.round_among import RoundBegins


def decide_among(
    state: SweepState,
    problem: Problem,
    situation: Situation,
    decided: DecidedRound,
    facts: SharedSweep,
    others: SharedCluster,
    rules: SharingRules,
) -> DecidedRound | None:
    """``decided`` with what is to be expected among ``others``; None where a job finds no place among them.

    :param problem: whole jobs, with the seconds now expected, on the nodes that are there.
    :param situation: where they stand.
    :param decided: what was decided around the jobs of others that run.
    :param facts: of the sweep.
    :raises AssertionError: when what is expected never ends, which is a mistake of Saturn's.
    """
    alone = decided.adoption
    if state.is_once:
        plan = plan_among(problem, alone.plan, facts, others, rules)
        if plan is None:
            return None
        adoption, jobs = alone._replace(plan=plan), waiting_as_planned(problem, plan)
    else:
        begins = RoundBegins(problem, situation, facts, others, rules, checkpoint_seconds(state))
        found = begins.decide(alone, state.plan, length_of(state))
        if found is None:
            return None
        adoption, jobs = found[0], found[1].jobs
    if state.law is None:
        return decided._replace(adoption=adoption)
    seen = seen_where_they_run(state, situation).difference(adoption.moved)
    return decided._replace(
        adoption=adoption, ends=ends_among(jobs, problem, facts, others, rules, state.law, seen)
    )
