"""What a round of a sweep does: who trains on, under which plan, and whose runs stay as they are.

A sweep that is planned once is one of a single round. The first round of any sweep is decided as the later
ones are; only nothing has been trained yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from saturn_airflow.deciding import plans_with_odds
from saturn_airflow.deciding.entering import entries, with_strategies, with_work_elsewhere
from saturn_airflow.launch.progress import Progress
from saturn_airflow.model import selection
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.errors import MissedDeadlineError
from saturn_airflow.model.estimates import Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.learning import SeenSpeed, corrected
from saturn_airflow.model.plan import Place, Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.settings import MAKESPAN, SweepSettings
from saturn_airflow.model.status import OVER, Status
from saturn_airflow.planning.online.adoption import Adoption, Effort, decide, what_is_left
from saturn_airflow.planning.online.begun_later import free_from, seen_from
from saturn_airflow.planning.online.ends import PlanEnds, ends_of
from saturn_airflow.planning.online.error_law import ErrorLaw
from saturn_airflow.planning.online.execution import Situation
from saturn_airflow.planning.online.replanning import on_nodes, stranded
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import Estimates, batches_per_epoch, total_batches

#: Seconds that saving a job takes, where none has been saved yet.
_CHECKPOINT_SECONDS = 5.0
#: A boundary with another to come is decided by up to so many searches, which share the time for planning.
_SEARCHES = 5
#: A share of a job's batches, or of an epoch, that counts as none.
_NOTHING = 1e-9
#: The share of a job that has trained all its batches and has not ended: it evaluates, or writes its model.
_ENDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """Where a sweep stands when one of its rounds is planned.

    :param number: of the round, from 1.
    :param problem: whole jobs, with the seconds that were first estimated.
    :param plan: the last that was made; None where the sweep begins, and with it all that follows is empty.
    :param before: the last entry of each job in a plan.
    :param progress: by job.
    :param statuses: how jobs ended, by their train tasks.
    :param pruned: jobs that the selection has dropped.
    :param standing: when the plans of earlier rounds were made that still stand, in seconds since the epoch.
    :param law: of the errors of earlier estimates; None where nothing is known of it.
    :param asks_in: seconds from the plan until its jobs ask for devices; only where the sweep begins.
    """

    settings: SweepSettings
    number: int
    problem: Problem
    jobs: Mapping[str, Job]
    estimates: Estimates
    plan: Plan | None = None
    before: Mapping[str, PlanEntry] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    statuses: Mapping[str, Status] = field(default_factory=dict)
    pruned: Sequence[str] = ()
    standing: Sequence[float] = ()
    law: ErrorLaw | None = None
    asks_in: float = 0.0

    @property
    def is_once(self) -> bool:
        """Whether all is planned here, once."""
        return self.settings.rounds.most == 1 and self.plan is None

    @property
    def is_last(self) -> bool:
        """Whether no round follows this one, unless a node is lost."""
        return self.number >= self.settings.rounds.most

    def per_epoch(self, job: Job) -> int:
        """Global batches in one pass over the job's data; 0 where that is not known."""
        return batches_per_epoch(job, self.estimates)


class JobsGoingOn(NamedTuple):
    """Who trains on after a boundary.

    :param jobs: that are neither done, nor dropped, nor failed for good.
    :param dropped: why the selection drops a job now, by its name.
    :param unfollowed: jobs that trained to their end after their task had left them, or was lost.
    :param rung: epochs that jobs train to in this round; infinite for their end.
    :param situation: where those jobs stand.
    :param warnings: about the selection.
    """

    jobs: tuple[str, ...]
    dropped: Mapping[str, str]
    unfollowed: tuple[str, ...]
    rung: float
    situation: Situation
    warnings: tuple[str, ...]


class ProblemOnNodes(NamedTuple):
    """A problem on the nodes that are there.

    :param gone: nodes that are not, with the reasons.
    :param stranded: jobs that fit on no other. Where all do, the problem is left as it was: they wait.
    """

    problem: Problem
    gone: Mapping[str, str]
    stranded: tuple[str, ...]

    @property
    def waits(self) -> bool:
        """Whether nothing fits on what is left."""
        return bool(self.gone) and {job.name for job in self.problem.jobs} == set(self.stranded)


class DecidedRound(NamedTuple):
    """The plan of a round.

    :param left: what it is for: what is left of the jobs, up to the round's rung.
    :param missed: why the deadline can't be met, where it can't.
    :param ends: when the plan may end, if it stays as it is; None where nothing is known of that.
    """

    adoption: Adoption
    left: Problem
    missed: str | None
    ends: PlanEnds | None = None


def who_goes_on(state: SweepState) -> JobsGoingOn:
    """Who trains on, and whom the selection drops."""
    progress = state.progress or {job.name: Progress() for job in state.problem.jobs}
    over = {job for job, status in state.statuses.items() if status in OVER}.union(state.pruned)
    going = [job for job, p in progress.items() if p.status != Status.FINISHED and job not in over]
    dropped: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    rule = state.settings.selection
    if rule is not None and state.plan is None:
        warnings = _never_judged(state, rule)
    elif rule is not None:
        histories = {job: p.history.get(rule.metric, {}) for job, p in progress.items()}
        found = selection.select(rule, histories, going, rule.metric)
        dropped, warnings = (
            selection.what_doomed(found.pruned, histories, going, rule.metric),
            found.warnings,
        )
    going = [job for job in going if job not in dropped]
    rung = _rung(state, [progress[job] for job in going])
    situation = situation_of(progress, {job: _goal(state, job, rung) for job in going})
    unfollowed = finished_alone(state.progress, state.statuses)
    return JobsGoingOn(tuple(going), dropped, tuple(unfollowed), rung, situation, warnings)


def situation_of(progress: Mapping[str, Progress], goals: Mapping[str, float]) -> Situation:
    """Where jobs stand that are to go on.

    :param goals: the share of its batches that each is to have trained at the end of the round; with 1 it is
        to end, too, which takes a while after its last batch.
    """
    left, running = {}, {}
    for job, goal in goals.items():
        p = progress[job]
        if goal - p.share > _NOTHING:
            left[job] = goal - p.share
        elif goal == 1.0:
            left[job] = _ENDING
        if p.alive and p.training and job in left:
            spec = p.alive.spec
            assert spec.device_ids is not None
            running[job] = Place(spec.technique, spec.devices, spec.node, tuple(spec.device_ids))
    return Situation(left, running)


def finished_alone(progress: Mapping[str, Progress], statuses: Mapping[str, Status]) -> list[str]:
    """Jobs that trained to their end after their task had left them, or was lost."""
    return [job for job, p in progress.items() if p.status == Status.FINISHED != statuses.get(job)]


def seen(progress: Mapping[str, Progress], estimates: Estimates, jobs: Mapping[str, Job]) -> list[SeenSpeed]:
    """The speeds that training showed of estimated strategies, as factors of their estimated seconds."""
    found = []
    for job, p in progress.items():
        for speed in p.speeds:
            estimate = estimates.get(Key(fingerprint(jobs[job]), speed.technique, speed.devices, speed.kind))
            if estimate is not None and estimate.works:
                factor = speed.seconds / estimate.seconds_per_batch
                found.append(SeenSpeed(job, speed.technique, speed.devices, speed.kind, factor))
    return found


def learned(problem: Problem, speeds: Iterable[SeenSpeed], jobs: Mapping[str, Job]) -> Problem:
    """``problem`` with the seconds to be expected after the speeds that were seen."""
    return corrected(problem, speeds, {job.name: fingerprint(jobs[job.name]) for job in problem.jobs})


def on_what_is_there(problem: Problem, cluster: Cluster, gone: Mapping[str, str]) -> ProblemOnNodes:
    """``problem`` on the nodes that are there, some of them perhaps again, with the jobs that fit on them.

    :param cluster: all nodes of the sweep.
    :param gone: nodes that have lost their worker or are drained, with the reasons.
    """
    kinds = {kind for job in problem.jobs for option in job.options for kind in option.seconds}
    here = [node for node in cluster if node.name not in gone and node.kind in kinds]
    gone = {node.name: gone[node.name] for node in cluster if node.name in gone}
    stay = tuple(stranded(problem, here))
    if len(stay) == len(problem.jobs):
        return ProblemOnNodes(problem, gone, stay)
    going = tuple(job for job in problem.jobs if job.name not in stay)
    return ProblemOnNodes(on_nodes(replace(problem, jobs=going), here), gone, stay)


def decide_round(
    state: SweepState, problem: Problem, situation: Situation, seconds: float | None
) -> DecidedRound:
    """The plan of the round.

    :param problem: whole jobs, with the seconds now expected, on the nodes that are there.
    :param seconds: until the deadline; None where there is none. Where it can't be met, all is planned to end
        as early as possible.
    """
    settings, length, checkpoint = state.settings, length_of(state), checkpoint_seconds(state)
    time_limit = settings.planning_seconds / (1 if _is_whole(state) else _SEARCHES)
    time_limit /= 1 if settings.confidence is None else plans_with_odds.SEARCHES

    def adopt(objective: str, deadline: float | None) -> Adoption:
        return decide(
            problem,
            state.plan,
            situation,
            effort=Effort(
                time_limit=time_limit, objective=objective, deadline=deadline, all_wait=state.plan is None
            ),
            checkpoint=checkpoint,
            length=length,
        )

    # What is searched and drawn begins when the jobs ask: before that, nobody can win anything.
    late = state.asks_in
    free, problem = free_from(problem, late), seen_from(problem, late)
    seconds = None if seconds is None else seconds - late
    situation = replace(situation, left={job.name: situation.left[job.name] for job in problem.jobs})
    ends = None if state.law is None else _ends(state, problem, situation, state.law, checkpoint)
    adoption, missed = _in_time(adopt, settings, seconds, ends)
    told = ends and ends(adoption).since(-late)
    return DecidedRound(adoption.later(late), what_is_left(free, situation), missed, told)


def length_of(state: SweepState) -> Callable[[float], float]:
    """When the round is to end that begins with a plan of so many seconds; infinite for not by time."""
    return (lambda makespan: math.inf) if _is_whole(state) else state.settings.rounds.length


def _is_whole(state: SweepState) -> bool:
    """Whether no time ends the round: it is the last, or jobs wait for each other at a rung."""
    return state.is_last or _waits_at_rungs(state.settings)


def checkpoint_seconds(state: SweepState) -> float:
    """What saving a job takes: the longest that was seen."""
    took = [p.checkpoint_seconds for p in state.progress.values() if p.checkpoint_seconds]
    return 0.0 if state.plan is None else max(took, default=_CHECKPOINT_SECONDS)


def seen_where_they_run(state: SweepState, situation: Situation) -> set[str]:
    """Jobs that run and whose speed was seen there."""
    running = {job: (place.technique, place.devices) for job, place in situation.running.items()}
    speeds = seen(state.progress, state.estimates, state.jobs)
    return {s.job for s in speeds if running.get(s.job) == (s.technique, s.devices)}


def staying(made: Sequence[PlanEntry], progress: Mapping[str, Progress], adoption: Adoption) -> set[str]:
    """Jobs whose runs go on.

    Those that train and are not moved; and those that wait in the queue for devices which the new plan gives
    them, too, behind none but such jobs.
    """
    training = {job for job, p in progress.items() if p.training and job not in adoption.moved}
    waiting = set()
    for entry in made:
        p = progress.get(entry.name) or Progress()
        if p.alive and not p.training and training.issuperset(entry.after):
            spec = p.alive.spec
            place = spec.technique, spec.devices, spec.node, spec.device_ids
            if place == entry.place and spec.batch_count is None:
                waiting.add(entry.name)
    return training | waiting


def entries_of(
    state: SweepState,
    problem: Problem,
    decided: DecidedRound,
    cluster: Cluster,
    going: JobsGoingOn,
    made: float,
) -> list[PlanEntry]:
    """The plan's jobs in the order of their start, with what their train tasks must know of the round.

    :param problem: whole jobs, with the seconds now expected.
    :param made: when the plan was made, in seconds since the epoch.
    """
    found = entries(decided.adoption.plan, state.jobs, state.estimates, cluster, made)
    by_name = {job.name: job for job in problem.jobs}
    found = [with_strategies(e, by_name[e.name], state.estimates) for e in found]
    if not state.is_once:
        stay = staying(found, state.progress, decided.adoption)
        found = [_in_round(state, entry, decided.adoption, going.rung, stay) for entry in found]
    return with_work_elsewhere(found, going.situation.left)


def without_place(state: SweepState, job: str, made: float, position: int) -> PlanEntry:
    """An entry for this round of a job that its plan does not have."""
    return replace(
        state.before[job],
        round=state.number,
        standing=tuple(state.standing),
        attempt=made,
        position=position,
        ends_at=None,
        most_batches=None,
    )


def _in_round(
    state: SweepState, entry: PlanEntry, adoption: Adoption, rung: float, stay: Set[str]
) -> PlanEntry:
    """``entry`` with what its train task must know of the round: when it ends, and how the job comes to it.

    :param rung: epochs that jobs train to.
    :param stay: jobs whose runs go on.
    """
    batches = entry.batches
    assert batches is not None, "what has no length is not planned"
    estimate = state.estimates[Key(entry.fingerprint, entry.technique, entry.devices, entry.kind)]
    training = estimate.setup_seconds + batches * estimate.seconds_per_batch
    per_epoch = state.per_epoch(entry.job) if math.isfinite(rung) else 0
    p, old = state.progress.get(entry.name) or Progress(), state.before.get(entry.name)
    moved = old is not None and p.steps > 0 and old.place != entry.place
    makespan = state.settings.objective == MAKESPAN
    planned = (entry.technique, entry.devices)
    return replace(
        entry,
        strategies=tuple(s for s in entry.strategies if (s.technique, s.devices) == planned),
        round=state.number,
        standing=tuple(state.standing),
        ends_at=entry.attempt + adoption.length if math.isfinite(adoption.length) else None,
        most_batches=int(rung * per_epoch) if per_epoch and rung * per_epoch < batches else None,
        planned_makespan=adoption.expected if makespan else adoption.plan.makespan,
        besides_seconds=estimate.seconds(batches) - estimate.launch_seconds - training,
        goes_on=p.alive.spec.priority if p.alive and entry.name in stay else None,
        moved_from=f"{old.technique} x {old.devices} on {old.node}" if moved and old else None,
    )


def _ends(
    state: SweepState, problem: Problem, situation: Situation, law: ErrorLaw, checkpoint: float
) -> Callable[[Adoption], PlanEnds]:
    """A function that says when a plan may end."""
    known = seen_where_they_run(state, situation)
    return lambda made: ends_of(problem, made.plan, situation, law, seen=known, checkpoint=checkpoint)


def _in_time(
    make: plans_with_odds.Make,
    settings: SweepSettings,
    seconds: float | None,
    ends: Callable[[Adoption], PlanEnds] | None,
) -> tuple[Adoption, str | None]:
    """The plan for the objective by the deadline; where none is in time, the earliest one, and why.

    :param make: plans for an objective and the seconds until a deadline.
    :param seconds: until the deadline, from before planning; None where there is none.
    :param ends: says when a plan may end.
    """
    if seconds is None:
        return make(settings.objective, None), None
    left = seconds - settings.planning_seconds
    try:
        if left <= 0:
            raise MissedDeadlineError(f"planning ends {-left:.0f} s after it")
        if settings.confidence is not None:
            return plans_with_odds.in_time_with_odds(make, ends, left, settings.confidence)
        return make(settings.objective, left), None
    except MissedDeadlineError as error:
        return make(MAKESPAN, None), str(error)


def _rung(state: SweepState, going: Sequence[Progress]) -> float:
    """Epochs that jobs train to in this round: the next rung of the selection after the last of them."""
    rule = state.settings.selection
    if rule is None or state.is_last:
        return math.inf
    epochs = [p.steps / p.per_epoch if p.per_epoch else 0.0 for p in going]
    return rule.next_rung(min(epochs, default=0.0) + _NOTHING)


def _never_judged(state: SweepState, rule: selection.Rule) -> tuple[str, ...]:
    """Who ends before a rule that counts epochs looks at anybody, as a job may that is given batches."""
    least = getattr(rule, "min_epochs", 0)
    short = {}
    for name, job in state.jobs.items():
        batches, per_epoch = job.hparams.batches, state.per_epoch(job)
        if batches is not None and batches < least * per_epoch:
            short[name] = f"{batches} batches are {batches / per_epoch:.2g} epochs of its data"
        elif batches is not None and least and not per_epoch:
            short[name] = "its data has no length, so that nothing tells when an epoch ends"
    return tuple(
        f"the selection compares jobs from epoch {least} on and never looks at {name!r}: {why}. It trains to "
        "its end and is not dropped; give epochs, or more batches"
        for name, why in short.items()
    )


def _goal(state: SweepState, name: str, rung: float) -> float:
    """The share of its batches that a job is to have trained at the end of the round."""
    job = state.jobs[name]
    total = total_batches(job, state.estimates)
    if not math.isfinite(rung) or not total:
        return 1.0
    return min(1.0, rung * state.per_epoch(job) / total) or 1.0


def _waits_at_rungs(settings: SweepSettings) -> bool:
    """Whether rounds end when all jobs have reached the selection's rung, rather than by ``rounds``."""
    rule = settings.selection
    return rule is not None and not settings.rounds.says_when and rule.next_rung(0.0) < math.inf
