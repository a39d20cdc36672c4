"""The planning task of a round: where the sweep stands, whom to drop, and what to do next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowSkipException

from saturn_airflow.model import selection
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Place, Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.settings import MAKESPAN
from saturn_airflow.model.status import OVER, Status
from saturn_airflow.operators.context import SweepContext, finite, mlflow_uri, pull_from_trials
from saturn_airflow.operators.drains import drained
from saturn_airflow.operators.inventory import lost
from saturn_airflow.operators.plan_task import PlanOperator, choices, entries, summary
from saturn_airflow.operators.presence import present
from saturn_airflow.operators.round_outcomes import last_outcomes, standing_plans
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import by_key, total_batches

if TYPE_CHECKING:
    from saturn_airflow.launch.progress import Progress
    from saturn_airflow.planning.online.adoption import Adoption
    from saturn_airflow.planning.online.execution import Situation

STATE_KEY = "round"
#: Seconds that saving a job takes, where none has been saved yet.
_CHECKPOINT_SECONDS = 5.0
_NOTHING = 1e-9
#: The share of a job that has trained all its batches and has not ended: it evaluates, or writes its model.
_ENDING = 1e-3


class RoundPlanOperator(PlanOperator):
    """Plan one round of a sweep.

    The first round's plan is that of a sweep without rounds, made in the knowledge of the boundary to come.
    Each later one drops the jobs that the selection drops, learns from the speeds that were seen, and either
    carries the plan on or stops the jobs that move. Skipped when nothing is left to train.

    :param number: of the round, from 1.
    :param earlier: the plan tasks of the rounds before, first to last.
    :param trained: the train tasks of the rounds before.
    """

    def __init__(
        self,
        *,
        number: int,
        earlier: Sequence[str],
        trained: Sequence[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.number = number
        self.earlier = list(earlier)
        self.trained = list(trained)
        self._problem: Problem | None = None
        self._left: Problem | None = None
        self._decision: Adoption | None = None
        #: When the plans of earlier rounds were made that still stand.
        self._standing: list[float] = []

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Plan the round.

        :raises AirflowSkipException: when nothing is left to train.
        """
        return self._first(context) if self.number == 1 else self._again(context)

    def solve(self, problem: Problem) -> Plan:
        """The first plan, made for a sweep that is looked at again."""
        from saturn_airflow.planning.online.adoption import what_is_left
        from saturn_airflow.planning.online.execution import Situation

        rung = self.also_told["rung"] = self._rung({})
        situation = Situation({job.name: self._goal(job.name, rung) for job in problem.jobs})
        self._problem, self._left = problem, what_is_left(problem, situation)
        self._decision = self._decide(problem, None, situation, 0.0)
        return self._decision.plan

    def part_of(self, problem: Problem) -> Problem:
        """What of ``problem`` the first plan is for: with a selection, all jobs up to their first rung."""
        assert self._left is not None
        return self._left

    def _first(self, context: Context) -> list[dict[str, Any]]:
        handed_on = super().execute(context)
        assert self._problem is not None
        assert self._decision is not None
        state = {
            "problem": self._problem.to_dict(),
            "estimates": [estimate.to_dict() for estimate in self.estimates.values()],
            "pruned": [],
        }
        context["ti"].xcom_push(STATE_KEY, finite(state))
        return handed_on

    def handed_on(self, found: list[PlanEntry]) -> list[PlanEntry]:
        """The first plan's entries with what their train tasks must know of the round."""
        assert self._decision is not None
        rung = self._rung({})
        return [self._with_round(entry, self._decision, rung) for entry in found]

    def _again(self, context: Context) -> list[dict[str, Any]]:
        from saturn_airflow import tracking
        from saturn_airflow.launch import runs
        from saturn_airflow.planning.online.adoption import what_is_left
        from saturn_airflow.planning.presenting import baselines

        ti = context["ti"]
        sweep = SweepContext.of(context, self.settings.group)
        last = self._last_plan(context)
        if last is None:
            raise AirflowSkipException("no earlier round has a plan")
        plan, before, state = last
        self._standing = standing_plans(ti, self.earlier)
        problem = Problem.from_dict(state["problem"])
        estimates = by_key(*map(Estimate.from_dict, state["estimates"]))
        cluster = every = self.settings.cluster
        listed = pull_from_trials(context, self.settings.trials_task, "jobs")
        jobs = {data["name"]: Job.from_dict(data) for data in listed}
        self.jobs, self.estimates = jobs, estimates
        self.ends_by = self.moment_of_deadline(context)
        progress = self._progress(sweep, problem)
        outcomes = last_outcomes(ti, self.earlier, self.trained)
        statuses = {job: outcome.status for job, outcome in outcomes.items()}
        going = self._going(statuses, progress, state["pruned"])
        dropped = self._drop(progress, going)
        going = [job for job in going if job not in dropped]
        pruned = [*state["pruned"], *dropped]
        ti.xcom_push(STATE_KEY, {**state, "pruned": pruned})
        if not going and not dropped and not _finished_alone(progress, statuses):
            raise AirflowSkipException("every job is done")
        _stop(progress, dropped)
        rung = self.also_told["rung"] = self._rung({job: progress[job] for job in going})
        situation = situation_of(progress, {job: self._goal(job, rung) for job in going})
        if situation.left:
            known = learned(problem, progress, estimates, jobs, self.log.info)
            # What is done must not bind the plan to a node that is gone.
            known = replace(known, jobs=tuple(job for job in known.jobs if job.name in situation.left))
            known = self._without_lost_nodes(known, every)
            cluster = present(every, self.left_out)
            situation = replace(situation, left={job.name: situation.left[job.name] for job in known.jobs})
            decision = self._decide(known, plan, situation, _checkpoint(progress))
            self._say(decision)
            for job in decision.moved:
                self.log.info("%s is stopped to go on elsewhere", job)
            plan, made = decision.plan, time.time()
            refusals = pull_from_trials(context, self.settings.trials_task, "refusals")
            left = what_is_left(known, situation)
            ti.xcom_push("choices", choices(left, plan, jobs, estimates, refusals))
            earlier = next(iter(before.values()))
            found = [e.in_sweep_of(earlier) for e in entries(plan, jobs, estimates, cluster, made)]
            staying = _staying(found, progress, decision)
            _stop(progress, [job for job in situation.left if job not in staying])
            result = [self._with_round(entry, decision, rung, progress, before, staying) for entry in found]
        else:
            result, made = [], time.time()
        # Asked again: some finish while this plans, some before they can be stopped.
        unfollowed = set(_finished_alone(self._progress(sweep, problem), statuses)).difference(pruned)
        result = [entry for entry in result if entry.name not in unfollowed]
        practice = baselines.current_practice(problem)
        if result:
            self.log.info("%s", summary(plan, practice))
        ti.xcom_push("unplanned", [])
        ti.xcom_push("attempt", made)
        ti.xcom_push("plan", self.told(plan, cluster, practice))
        sweep_run = tracking.reopen_sweep(
            mlflow_uri(self.settings.mlflow_conn_id),
            pull_from_trials(context, self.settings.trials_task, "sweep"),
            sweep.folder,
        )
        sweep_run.log_plan(plan, cluster, self.number)
        self.mlflow_url = sweep_run.url
        for job in sorted(unfollowed):
            self.log.info("%s finished while this round was planned", job)
            run = runs.all_of(sweep.job_folder(job))[-1]
            seen_off = self._without_place(before[job], made, len(result))
            result.append(replace(seen_off, goes_on=run.spec.priority))
        for job in dropped:
            when = f"pruned after {progress[job].steps} batches, before round {self.number}"
            reason = f"{dropped[job]}: {when}"
            self.log.warning("%s is %s", job, reason)
            result.append(replace(self._without_place(before[job], made, len(result)), pruned=reason))
        return [entry.to_dict() for entry in result]

    def _without_place(self, before: PlanEntry, made: float, position: int) -> PlanEntry:
        """An entry for this round of a job that its plan does not have.

        :param before: the job's last entry.
        """
        return replace(
            before, round=self.number, standing=tuple(self._standing), attempt=made, position=position
        )

    def _last_plan(self, context: Context) -> tuple[Plan, dict[str, PlanEntry], dict[str, Any]] | None:
        """The last plan that was made, the last entry of each job, and the state."""
        ti = context["ti"]
        found: dict[str, PlanEntry] = {}
        plan = state = None
        for task in self.earlier:
            made, entered, kept = (
                ti.xcom_pull(task_ids=task, key=key, map_indexes=-1)
                for key in ("plan", "return_value", STATE_KEY)
            )
            if entered is not None:
                plan = made
                found.update({entry.name: entry for entry in map(PlanEntry.from_dict, entered)})
            state = kept or state
        return (Plan.from_dict(plan), found, state) if plan and state else None

    def _progress(self, sweep: SweepContext, problem: Problem) -> dict[str, Progress]:
        from saturn_airflow.launch import progress, restarting

        def of(folder: Path) -> Progress:
            anew = restarting.was_cleared(folder, self._standing)
            return progress.Progress() if anew else progress.of(folder)

        return {job.name: of(sweep.job_folder(job.name)) for job in problem.jobs}

    def _without_lost_nodes(self, problem: Problem, cluster: Cluster) -> Problem:
        """``problem`` without nodes that have lost their worker or are drained, and without jobs that fit on
        no other; with those that are there again.

        Where no job fits elsewhere it stays as it is: they wait for their node.
        """
        from saturn_airflow.planning.online.replanning import on_nodes, stranded

        kinds = {kind for job in problem.jobs for option in job.options for kind in option.seconds}
        gone = {node.name: "no worker listens for it any more" for node in lost(cluster)} | drained()
        here = [node for node in cluster if node.name not in gone and node.kind in kinds]
        stay = stranded(problem, here)
        names = ", ".join(f"{node.name} ({gone[node.name]})" for node in cluster if node.name in gone)
        if len(stay) == len(problem.jobs):
            self.log.error("Gone: %s; and what is left fits nowhere else", names)
            return problem
        self.left_out = {node.name: gone[node.name] for node in cluster if node.name in gone}
        if names:
            self.log.warning("Gone: %s; its jobs go elsewhere", names)
        for job in stay:
            self.log.error("%s fits nowhere else: this round is without it", job)
        going = tuple(job for job in problem.jobs if job.name not in stay)
        return on_nodes(replace(problem, jobs=going), here)

    def _going(
        self, statuses: Mapping[str, Status], progress: Mapping[str, Progress], pruned: Sequence[str]
    ) -> list[str]:
        """Jobs that are neither done, nor dropped, nor failed for good."""
        over = {job for job, status in statuses.items() if status in OVER}
        return [
            job
            for job, p in progress.items()
            if p.status != Status.FINISHED and job not in over and job not in pruned
        ]

    def _drop(self, progress: Mapping[str, Progress], going: Sequence[str]) -> dict[str, str]:
        rule = self.settings.selection
        if rule is None:
            return {}
        histories = {job: p.history.get(rule.metric, {}) for job, p in progress.items()}
        found = selection.select(rule, histories, going, rule.metric)
        for warning in found.warnings:
            self.log.error("%s", warning)
        return selection.what_doomed(found.pruned, histories, going, rule.metric)

    def _goal(self, name: str, rung: float) -> float:
        """The share of its batches that a job is to have trained at the end of the round."""
        job = self.jobs[name]
        total = total_batches(job, self.estimates)
        if not math.isfinite(rung) or not total:
            return 1.0
        return min(1.0, rung * self._per_epoch(job) / total) or 1.0

    def _per_epoch(self, job: Job) -> int:
        mark = fingerprint(job)
        return max((e.batches_per_epoch for e in self.estimates.values() if e.fingerprint == mark), default=0)

    def _rung(self, progress: Mapping[str, Progress]) -> float:
        """Epochs that jobs train to in this round; infinite for their end."""
        rule = self.settings.selection
        if rule is None or self.number == self.settings.rounds.most:
            return math.inf
        epochs = [p.steps / p.per_epoch if p.per_epoch else 0.0 for p in progress.values()]
        return rule.next_rung(min(epochs, default=0.0) + _NOTHING)

    def _decide(
        self, problem: Problem, plan: Plan | None, situation: Situation, checkpoint: float
    ) -> Adoption:
        from saturn_airflow.planning.online.adoption import Effort, decide

        policy = self.settings.rounds
        # Where jobs wait for each other at a rung, that is what ends a round.
        whole = self.number == policy.most or self._waits_at_rungs()
        # Looking beyond the boundary takes up to five searches.
        seconds = self.settings.planning_seconds / (1 if whole else 5)
        return self.in_time(
            lambda objective, deadline: decide(
                problem,
                plan,
                situation,
                effort=Effort(time_limit=seconds, objective=objective, deadline=deadline),
                checkpoint=checkpoint,
                length=(lambda makespan: math.inf) if whole else policy.length,
            )
        )

    def _waits_at_rungs(self) -> bool:
        rule = self.settings.selection
        return rule is not None and not self.settings.rounds.says_when and rule.next_rung(0.0) < math.inf

    def _with_round(
        self,
        entry: PlanEntry,
        decision: Adoption,
        rung: float,
        progress: Mapping[str, Progress] | None = None,
        before: Mapping[str, PlanEntry] | None = None,
        staying: Set[str] = frozenset(),
    ) -> PlanEntry:
        """A plan's entry with what its train task must know of the round."""
        from saturn_airflow.launch.progress import Progress

        batches = entry.batches
        assert batches is not None, "what has no length is not planned"
        estimate = self.estimates[Key(entry.fingerprint, entry.technique, entry.devices, entry.kind)]
        training = estimate.setup_seconds + batches * estimate.seconds_per_batch
        ends_at = most_batches = goes_on = moved_from = None
        if math.isfinite(decision.length):
            ends_at = entry.attempt + decision.length
        if math.isfinite(rung) and batches:
            per_epoch = self._per_epoch(entry.job)
            if per_epoch and rung * per_epoch < batches:
                most_batches = int(rung * per_epoch)
        p = progress[entry.name] if progress else Progress()
        if p.alive and entry.name in staying:
            goes_on = p.alive.spec.priority
        if before and p.steps and (old := before.get(entry.name)) and old.place != entry.place:
            moved_from = f"{old.technique} x {old.devices} on {old.node}"
        return replace(
            entry,
            round=self.number,
            standing=tuple(self._standing),
            ends_at=ends_at,
            most_batches=most_batches,
            planned_makespan=(
                decision.expected if self.settings.objective == MAKESPAN else decision.plan.makespan
            ),
            besides_seconds=estimate.seconds(batches) - estimate.launch_seconds - training,
            goes_on=goes_on,
            moved_from=moved_from,
        )

    def _say(self, decision: Adoption) -> None:
        if decision.adopted and self.settings.objective != MAKESPAN:
            self.log.info("A new plan: it ends in %.1f s, moves included", decision.plan.makespan)
        elif decision.adopted:
            self.log.info(
                "A new plan: all is done in %.1f s, moves included; the one before would take %.1f s more",
                *(decision.expected, decision.otherwise - decision.expected),
            )
        else:
            self.log.info("The plan is carried on: no other wins more than its moves cost")


def situation_of(progress: Mapping[str, Progress], goals: Mapping[str, float]) -> Situation:
    """Where jobs stand that are to go on.

    :param goals: the share of its batches that each is to have trained at the end of the round; with 1 it is
        to end, too, which takes a while after its last batch.
    """
    from saturn_airflow.planning.online.execution import Situation

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


def _finished_alone(progress: Mapping[str, Progress], statuses: Mapping[str, Status]) -> list[str]:
    """Jobs that trained to their end after their task had left them, or was lost."""
    return [job for job, p in progress.items() if p.status == Status.FINISHED != statuses.get(job)]


def learned(
    problem: Problem,
    progress: Mapping[str, Progress],
    estimates: Mapping[Any, Estimate],
    jobs: Mapping[str, Job],
    say: Callable[..., object] = lambda *_: None,
) -> Problem:
    """``problem`` with the seconds to be expected after the speeds that were seen."""
    from saturn_airflow.planning.online.learning import Seen, corrected

    marks = {name: fingerprint(jobs[name]) for name in progress}
    seen = []
    for job, p in progress.items():
        for speed in p.speeds:
            estimate = estimates.get(Key(marks[job], speed.technique, speed.devices, speed.kind))
            if estimate is not None and estimate.works:
                factor = speed.seconds / estimate.seconds_per_batch
                seen.append(Seen(job, speed.technique, speed.devices, speed.kind, factor))
                say(
                    "%s under %s x %d takes %.2f times the estimate",
                    job,
                    speed.technique,
                    speed.devices,
                    factor,
                )
    return corrected(problem, seen, marks)


def _staying(entries: Sequence[PlanEntry], progress: Mapping[str, Progress], decision: Adoption) -> set[str]:
    """Jobs whose runs go on: those that train and are not moved, and those that wait for them to end, in the
    line for devices that are still theirs."""
    training = {job for job, p in progress.items() if p.training and job not in decision.moved}
    waiting = set()
    for entry in entries:
        p = progress[entry.name]
        if p.alive and not p.training and training.issuperset(entry.after):
            spec = p.alive.spec
            place = spec.technique, spec.devices, spec.node, spec.device_ids
            if place == entry.place and spec.batch_count is None:
                waiting.add(entry.name)
    return training | waiting


def _stop(progress: Mapping[str, Progress], jobs: Iterable[str]) -> None:
    """Have the training of ``jobs`` write checkpoints and end, on whatever node."""
    alive = [run for job in jobs if (run := progress[job].alive)]
    for run in alive:
        run.ask_to_stop()
    for run in alive:
        run.stop()


def _checkpoint(progress: Mapping[str, Progress]) -> float:
    seen = [p.checkpoint_seconds for p in progress.values() if p.checkpoint_seconds]
    return max(seen, default=_CHECKPOINT_SECONDS)
