"""Which strategies to measure next, so that the plan is as good as if all had been measured.

The first wave measures each job on as few devices as it may run on. Then the plan decides: it is made with
what was measured and with the best that all else could turn out to be. What that plan would use is measured,
until a plan is made of measured strategies and nothing unmeasured could make it shorter by more than
:data:`WORTH`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import Estimates, ran_out, refusal
from saturn_airflow.profiling.unmeasured import likely

#: Waves of trials a sweep has at most. With three the last one measures more, and plans are worse.
WAVES = 4
#: A makespan that is shorter by this share is worth trials.
WORTH = 0.01
#: The same where earlier sweeps have measured what they thought worth it.
WORTH_AGAIN = 0.15
# Optimistic estimates within this factor are taken for equal.
_TIE = 1.02
# How many plans one wave is put together from: each takes the trials chosen so far to turn out as is likely.
_LOOKS = 3

Solve = Callable[[Problem], Plan]


def first_wave(knowledge: Knowledge) -> list[Key]:
    """What to measure before anything can be planned."""
    return _unexplored(knowledge)


def next_wave(knowledge: Knowledge, solve: Solve, *, worth: float = WORTH, last: bool = False) -> list[Key]:
    """What to measure next; nothing when the plan would not use it.

    :param solve: plans a problem.
    :param worth: the share by which a plan must be shorter to be worth trials.
    :param last: whether no further wave follows.
    """
    wave = dict.fromkeys(_unexplored(knowledge))
    measured = knowledge.problem(knowledge.known)
    if measured is None:
        return list(wave)
    good_enough = (1 - worth) * solve(measured).makespan
    hopes = knowledge.hopes()
    for _ in range(_LOOKS):
        problem = knowledge.problem({**hopes, **knowledge.known})
        assert problem is not None
        plan = solve(problem)
        used = [key for key in _used(plan, knowledge) if key in hopes and key not in wave]
        if plan.makespan > good_enough or not used:
            break
        # What the optimistic plan would use is measured. Then the same is asked again, with likely speeds for
        # what is in the wave by now: it would use something else in its place.
        for key in used:
            wave.update(dict.fromkeys(_probes(key, knowledge, hopes, last)))
        for key in {*wave, *used} & hopes.keys():
            hopes[key] = likely(hopes[key], knowledge.beside(key))
    return list(wave)


def estimates_for_plan(knowledge: Knowledge, solve: Solve) -> Estimates:
    """What to plan with: what was measured, and what lies in between where that makes the plan shorter."""
    between = knowledge.interpolated()
    known = knowledge.known
    without, having = knowledge.problem(known), knowledge.problem({**between, **known})
    if not between or without is None or having is None:
        return known
    worth_it = solve(having).makespan <= (1 - WORTH) * solve(without).makespan
    return {**between, **known} if worth_it else known


def _unexplored(knowledge: Knowledge) -> list[Key]:
    """What to try next of each job of which nothing is known to work on a kind of device."""
    # Of jobs that share a fingerprint, some may be bound to techniques.
    bound = {(fingerprint(job), tuple(job.techniques or ())) for job in knowledge.jobs}
    groups: dict[tuple[str, str, tuple[str, ...]], list[Key]] = {}
    for key in knowledge.untried():
        for mark, techniques in sorted(bound):
            if mark == key.fingerprint and (not techniques or key.technique in techniques):
                groups.setdefault((mark, key.kind, techniques), []).append(key)
    found: list[Key] = []
    own = knowledge.own
    for (_, _, techniques), keys in groups.items():
        known = [e for e in knowledge.beside(keys[0]) if not techniques or e.technique in techniques]
        jobs = [job for key in keys for job in knowledge.grid[key].jobs.values()]
        if all(any(e.works and not refusal(job, e) for e in known) for job in jobs):
            continue
        frugal = [key for key in keys if knowledge.grid[key].spares_memory]
        others = [key for key in keys if key not in frugal]
        if any(_lacks_memory(e, jobs) or (not e.works and e.technique in own) for e in known):
            # Few devices may be too small: what needs least of one, and each technique where it has most.
            found += frugal[:1]
            widest = {key.technique: key for key in sorted(others, key=lambda key: key.devices)}
            found += widest.values()
        else:
            fewest = min(key.devices for key in others or frugal)
            found += [key for key in others or frugal if key.devices == fewest]
    return found


def _lacks_memory(estimate: Estimate, jobs: Sequence[Job]) -> bool:
    return estimate.out_of_memory or any(ran_out(job, estimate) for job in jobs)


def _probes(key: Key, knowledge: Knowledge, hopes: Mapping[Key, Estimate], last: bool) -> list[Key]:
    """What to measure when the plan would use ``key``: it, and what could be as good in its place.

    A technique that has not been seen on several devices is first looked at on few of them, which is cheap
    and says how it scales.
    """
    found = []
    for rival, hope in hopes.items():
        alike = (rival.fingerprint, rival.kind, rival.devices) == (key.fingerprint, key.kind, key.devices)
        if not alike or hope.seconds_per_batch > _TIE * hopes[key].seconds_per_batch:
            continue
        own = [e for e in knowledge.beside(rival) if e.technique == rival.technique]
        fewer = [
            rival._replace(devices=devices)
            for devices in range(2, rival.devices)
            if rival._replace(devices=devices) in hopes
        ]
        scaling_known = any(e.works and e.devices > 1 for e in own)
        found.append(fewer[0] if fewer and not scaling_known and not last else rival)
    return found


def _used(plan: Plan, knowledge: Knowledge) -> list[Key]:
    """The strategies of ``plan``."""
    marks = {job.name: fingerprint(job) for job in knowledge.jobs}
    kinds = {node.name: node.kind for node in knowledge.cluster}
    return [Key(marks[a.job], a.technique, a.devices, kinds[a.node]) for a in plan.assignments]
