"""The planning task: from estimates, and from what has been trained since, to the plan of a round."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from saturn_airflow.deciding.choices import choices
from saturn_airflow.deciding.plan_in_words import in_words, summary
from saturn_airflow.model import formats, printable
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.settings import DEVICE_TIME, SweepSettings
from saturn_airflow.model.sharing import SharedSweep, least_seconds
from saturn_airflow.operators import deadline_watch, promises
from saturn_airflow.operators.context import (
    SweepContext,
    deployed_teams,
    finite,
    mlflow_uri,
    pull_from_trials,
)
from saturn_airflow.operators.drains import drained
from saturn_airflow.operators.first_plan import profiling, to_plan
from saturn_airflow.operators.inventory import lost
from saturn_airflow.operators.kept_plan import KeptPlanOperator
from saturn_airflow.operators.others import OTHERS_KEY, among_others, around_others, others_now, tell_others
from saturn_airflow.operators.presence import LEFT_OUT_KEY, left_out_now, present
from saturn_airflow.operators.round_outcomes import last_outcomes, now_after, progress_of, standing_plans
from saturn_airflow.operators.round_reserve import skip_rounds_after
from saturn_airflow.operators.round_watch import over_file
from saturn_airflow.operators.wave_tasks import Learned, quick_solve
from saturn_airflow.plugin.links import MlflowRunLink, PlanLink
from saturn_airflow.profiling.fingerprints import fingerprint, speed_versions
from saturn_airflow.profiling.options import by_key

if TYPE_CHECKING:
    from saturn_airflow.deciding.next_round import DecidedRound, JobsGoingOn, SweepState
    from saturn_airflow.launch.progress import Progress

#: What the first plan of a sweep with rounds leaves for the later ones.
STATE_KEY = "round"


class PlanOperator(KeptPlanOperator):
    """Solve the sweep's SPASE problem, anew in each round.

    The first plan is made from the trials' estimates. Each later one drops the jobs that the selection drops,
    learns from the speeds that were seen, and either carries the plan on or stops the jobs that move; skipped
    when nothing is left to train.

    Returns the jobs in the order of their start, each with its strategy, node and devices. Pushes ``plan``
    (the plan; beside it the makespan of current practice, and the deadline), ``unplanned`` (jobs no strategy
    can train, with the reason), ``choices`` (for each job the strategies it had, with their estimates, and
    why this one was chosen) and ``attempt`` (what the report knows this plan's outcomes by); the first also
    ``profiling`` (what the trials took).

    :param earlier: the plan tasks of the rounds before, first to last.
    :param trained: the train tasks of the rounds before.
    """

    operator_extra_links = (MlflowRunLink(), PlanLink())

    def __init__(
        self,
        *,
        settings: SweepSettings,
        profile_tasks: list[str],
        earlier: Sequence[str] = (),
        trained: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(settings=settings, **kwargs)
        self.profile_tasks = profile_tasks
        self.earlier = list(earlier)
        self.trained = list(trained)
        #: What the pages are told besides the plan.
        self.also_told: dict[str, Any] = {
            "compared_by": {"metric": settings.metric, "mode": settings.better},
            "rounds_most": settings.rounds.most,
        }
        #: When all has to be done, in seconds since the epoch, and whether the plan is made to meet it.
        self.ends_by: float | None = None
        self.meets_deadline = True
        #: Nodes that take no part, with the reasons.
        self.left_out: dict[str, str] = {}
        #: Jobs that wait for their node, which is gone, because no later round could have them.
        self.waiting: tuple[str, ...] = ()
        #: What the trials said, where this is the first plan.
        self._learned: Learned | None = None

    def plan(self, context: Context) -> list[dict[str, Any]]:
        """Plan the round.

        :raises AirflowFailException: when there are no trials, no job has a strategy that works, or the
            deployment does not let the sweep have its priority or team.
        :raises AirflowSkipException: when nothing is left to train.
        """
        from saturn_airflow.deciding import next_round

        sweep = SweepContext.of(context, self.settings.group)
        check_team(self.settings)
        self.ends_by = self.moment_of_deadline(context)
        state = self._state_so_far(context, sweep) if self.earlier else self._beginning(context, sweep)
        uri = mlflow_uri(self.settings.mlflow_conn_id)
        known = promises.Experience.of(uri, sweep.dag_id, sweep.key, state.estimates.values())
        state = replace(state, law=known.law, asks_in=0.0 if self.earlier else known.asks_in)
        self.also_told["asks_in"] = state.asks_in
        going = next_round.who_goes_on(state)
        self._leave_behind(context, state, going)
        self.also_told["rung"] = going.rung
        plan, cluster, made = state.plan, self.settings.cluster, now_after(state.standing)
        found: list[PlanEntry] = []
        if going.situation.left:
            problem = self._problem_now(state, going)
            cluster = present(self.settings.cluster, self.left_out)
            facts = self._facts(context, sweep, state)
            others = others_now(context, sweep.key, problem)
            self.hand_on(context, OTHERS_KEY, others.planned)
            problem = around_others(problem, others, going.situation.running.values())
            decided = self.decide(state, problem, going)
            if self.settings.objective != DEVICE_TIME:
                decided = among_others(state, problem, going.situation, decided, facts, others)
            self._promise(known, decided)
            self._say(context, state, decided)
            plan, made = decided.adoption.plan, now_after(state.standing)
            refusals = pull_from_trials(context, self.settings.trials_task, "refusals")
            had = choices(decided.left, plan, state.jobs, state.estimates, refusals)
            self.hand_on(context, "choices", finite(had))
            found = [
                replace(entry, arrived=facts.arrived, alone=facts.alone, deadline=facts.deadline)
                for entry in next_round.entries_of(state, problem, decided, cluster, going, made)
            ]
            tell_others(sweep, facts, problem, found, known.law)
            self.also_told |= deadline_watch.say_what_breaks(
                context, sweep, self.settings, made, self.meets_deadline
            )
            stay = next_round.staying(found, state.progress, decided.adoption)
            stay.update(self.waiting)
            _stop(state.progress, [job for job in going.situation.left if job not in stay])
        assert plan is not None, "where nothing is left, there was a plan before"
        unfollowed = self._unfollowed(sweep, state)
        found = [entry for entry in found if entry.name not in unfollowed]
        self._tell(context, sweep, state, plan, cluster, made, shown=bool(found))
        found += self._entries_to_conclude(sweep, state, going, unfollowed, made, len(found))
        return [entry.to_dict() for entry in found]

    def _beginning(self, context: Context, sweep: SweepContext) -> SweepState:
        """Where the sweep stands after its trials.

        :raises AirflowFailException: when no job can be planned.
        """
        from saturn_airflow.deciding.next_round import SweepState
        from saturn_airflow.profiling import waves

        began = time.time()
        cluster = self.nodes_now(context)
        refusals = pull_from_trials(context, self.settings.trials_task, "refusals")
        self._learned = learned = Learned.of(context, self.settings, self.profile_tasks, cluster)
        jobs = {job.name: job for job in learned.knowledge.jobs}
        self.hand_on(context, "profiling", profiling(learned, began))
        estimates = waves.estimates_for_plan(learned.knowledge, quick_solve(self.settings.planning_seconds))
        planned, unplanned = to_plan(
            learned, estimates, refusals, self.settings.profile, self.left_out, self.log.warning
        )
        self.hand_on(context, "unplanned", unplanned)
        self.also_told |= {"jobs": len(jobs), "not_planned": len(unplanned)}
        for entry in unplanned:
            self.log.error("%s is left out: %s", entry["job"], entry["reason"])
        if not planned:
            reasons = "; ".join(f"{e['job']}: {printable.in_short(e['reason'])}" for e in unplanned)
            raise AirflowFailException(f"no job can be planned. {reasons}")
        try:
            problem = Problem(sweep.key, cluster.nodes, tuple(planned))
        except InvalidSweepError as error:
            raise AirflowFailException(str(error)) from None
        return SweepState(
            settings=self.settings, number=self.number, problem=problem, jobs=jobs, estimates=estimates
        )

    def _state_so_far(self, context: Context, sweep: SweepContext) -> SweepState:
        """Where the sweep stands after the rounds before this one.

        :raises AirflowSkipException: when none of them has a plan, or this one is in reserve and not needed.
        """
        from saturn_airflow.deciding import next_round, refused_strategies

        ti = context["ti"]
        before = ti.xcom_pull(task_ids=self.earlier[-1], key="attempt", map_indexes=-1)
        if self.number > self.settings.rounds.most and not over_file(sweep, self.number - 1, before).exists():
            raise AirflowSkipException("no node was lost")
        last = self._last_plan(context)
        if last is None:
            raise AirflowSkipException("no earlier round has a plan")
        plan, before, state = last
        listed = pull_from_trials(context, self.settings.trials_task, "jobs")
        problem, standing = Problem.from_dict(state["problem"]), standing_plans(ti, self.earlier)
        self.hand_on(context, "unplanned", [])
        so_far = next_round.SweepState(
            settings=self.settings,
            number=self.number,
            problem=problem,
            jobs={data["name"]: Job.from_dict(data) for data in listed},
            estimates=by_key(*map(Estimate.from_dict, state["estimates"])),
            plan=plan,
            before=before,
            progress=progress_of(sweep, problem, standing),
            statuses={job: o.status for job, o in last_outcomes(ti, self.earlier, self.trained).items()},
            pruned=state["pruned"],
            standing=standing,
        )
        return refused_strategies.without_refused(so_far)

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

    def _leave_behind(self, context: Context, state: SweepState, going: JobsGoingOn) -> None:
        """Note for later rounds what this one begins with, and stop the jobs that are dropped.

        :raises AirflowSkipException: when nothing is left to do.
        """
        for warning in going.warnings:
            self.log.error("%s", warning)
        if self.number < self.settings.last_round:
            told = {
                "problem": state.problem.to_dict(),
                "estimates": [estimate.to_dict() for estimate in state.estimates.values()],
                "pruned": [*state.pruned, *going.dropped],
            }
            self.hand_on(context, STATE_KEY, finite(told))
        if not (going.jobs or going.dropped or going.unfollowed):
            skip_rounds_after(context, self.settings, self.number)
            raise AirflowSkipException("every job is done")
        _stop(state.progress, going.dropped)

    def _problem_now(self, state: SweepState, going: JobsGoingOn) -> Problem:
        """Whole jobs that go on, with the seconds to be expected now, on the nodes that are there."""
        from saturn_airflow.deciding import next_round

        if state.plan is None:
            return state.problem
        speeds = next_round.seen(state.progress, state.estimates, state.jobs)
        for s in speeds:
            self.log.info(
                "%s under %s x %d takes %.2f times the estimate", s.job, s.technique, s.devices, s.factor
            )
        known = next_round.learned(state.problem, speeds, state.jobs)
        # What is done must not bind the plan to a node that is gone.
        left = tuple(job for job in known.jobs if job.name in going.situation.left)
        return self.on_what_is_there(replace(known, jobs=left))

    def on_what_is_there(self, problem: Problem) -> Problem:
        """``problem`` on the nodes that have a worker now and are not drained; says what that changes."""
        from saturn_airflow.deciding import next_round

        cluster = self.settings.cluster
        gone = {node.name: "no worker listens for it any more" for node in lost(cluster)} | drained()
        found = next_round.on_what_is_there(problem, cluster, gone)
        names = ", ".join(f"{node} ({why})" for node, why in found.gone.items())
        if found.waits:
            self.log.error("Gone: %s; and what is left fits nowhere else", names)
            return problem
        self.left_out = dict(found.gone)
        if names:
            self.log.warning("Gone: %s; its jobs go elsewhere", names)
        is_last = self.number == self.settings.last_round
        self.waiting = found.stranded if is_last else ()
        for job in found.stranded:
            what = "it waits for its node" if is_last else "this round is without it"
            self.log.error("%s fits nowhere else: %s", job, what)
        return found.problem

    def decide(self, state: SweepState, problem: Problem, going: JobsGoingOn) -> DecidedRound:
        """The plan of the round."""
        from saturn_airflow.deciding import next_round

        seconds = None if self.ends_by is None else self.ends_by - time.time()
        found = next_round.decide_round(state, problem, going.situation, seconds)
        if found.missed is not None:
            self.meets_deadline = False
            self.log.error(
                "THE DEADLINE CAN'T BE MET: %s. All is planned to end as early as possible", found.missed
            )
        return found

    def _promise(self, known: promises.Experience, decided: DecidedRound) -> None:
        """Say when all is done with the odds that were asked for."""
        left = None if self.ends_by is None else self.ends_by - time.time()
        odds = promises.odds_of(decided.ends, left)
        promise = promises.told(known, decided.ends, self.settings.promised)
        self.also_told["promise"] = {**promise, "odds": odds}
        self.log.info("%s", promises.in_words(promise, odds))

    def _facts(self, context: Context, sweep: SweepContext, state: SweepState) -> SharedSweep:
        """What other sweeps are told of this one, besides its jobs."""
        first = next(iter(state.before.values()), None)
        return SharedSweep(
            name=sweep.key,
            jobs=(),
            arrived=pull_from_trials(context, self.settings.trials_task, "started"),
            alone=first.alone if first else least_seconds(state.problem.jobs, state.problem.nodes),
            priority=self.settings.priority,
            deadline=self.ends_by,
            preempt=self.settings.preempt and state.is_once,
            team=self.settings.team,
            asks=time.time() + state.asks_in,
        )

    def _unfollowed(self, sweep: SweepContext, state: SweepState) -> set[str]:
        """Asked again: some finish while this plans, some before they can be stopped."""
        from saturn_airflow.deciding.next_round import finished_alone

        if state.plan is None:
            return set()
        now = progress_of(sweep, state.problem, state.standing)
        return set(finished_alone(now, state.statuses)).difference(state.pruned)

    def _entries_to_conclude(
        self,
        sweep: SweepContext,
        state: SweepState,
        going: JobsGoingOn,
        unfollowed: set[str],
        made: float,
        position: int,
    ) -> list[PlanEntry]:
        """Entries for jobs without a place in the plan, by which somebody concludes them."""
        from saturn_airflow.deciding.next_round import without_place
        from saturn_airflow.launch import runs

        found: list[PlanEntry] = []
        for job in sorted(unfollowed.difference(going.dropped)):
            self.log.info("%s finished while this round was planned", job)
            run = runs.all_of(sweep.job_folder(job))[-1]
            entry = without_place(state, job, made, position + len(found))
            found.append(replace(entry, goes_on=run.spec.priority))
        for job in sorted(set(self.waiting) - unfollowed):
            alive = state.progress[job].alive
            entry = without_place(state, job, made, position + len(found))
            found.append(replace(entry, goes_on=alive.spec.priority if alive else None))
        for job, why in going.dropped.items():
            when = f"pruned after {state.progress[job].steps} batches, before round {self.number}"
            self.log.warning("%s is %s: %s", job, why, when)
            entry = without_place(state, job, made, position + len(found))
            found.append(replace(entry, pruned=f"{why}: {when}"))
        return found

    def _tell(
        self,
        context: Context,
        sweep: SweepContext,
        state: SweepState,
        plan: Plan,
        cluster: Cluster,
        made: float,
        *,
        shown: bool,
    ) -> None:
        """Hand the plan on: to the pages and the report, to MLflow, and, where jobs are in it, to the log."""
        from saturn_airflow import tracking
        from saturn_airflow.planning.online.begun_later import free_from
        from saturn_airflow.planning.presenting import baselines

        practice = baselines.current_practice(free_from(state.problem, state.asks_in))
        if shown:
            self.log.info("%s", summary(plan, practice))
        self.hand_on(context, "attempt", made)
        self.hand_on(context, "plan", self.told(plan, cluster, practice))
        uri = mlflow_uri(self.settings.mlflow_conn_id)
        parent = pull_from_trials(context, self.settings.trials_task, "sweep")
        run = tracking.reopen_sweep(uri, parent, sweep.folder, send=False)
        run.log_plan(plan, self.number, self.also_told.get("promise"))
        self.mlflow_url = run.url
        if self._learned is not None:
            lasting = [estimate for estimate in self._learned.fresh if not estimate.passing]
            names = {fingerprint(job): job.name for job in reversed(self._learned.knowledge.jobs)}
            tracking.estimate_store.keep(lasting, sweep.folder, speed_versions(), names)
        self.send_records = lambda: run.log_chart(plan, cluster, self.number)

    def _say(self, context: Context, state: SweepState, decided: DecidedRound) -> None:
        """Say what was decided, and tell the author where the first plan can't meet the deadline."""
        if state.plan is not None:
            self.log.info("%s", in_words(decided.adoption, self.settings.objective))
            for job in decided.adoption.moved:
                self.log.info("%s is stopped to go on elsewhere", job)
        elif not self.meets_deadline:
            late = {"at": self.ends_by, "planned": False}
            deadline_watch.tell_author(self.settings.on_missed_deadline, context, late)

    def nodes_now(self, context: Context) -> Cluster:
        """The nodes to plan with first."""
        cluster = self.settings.cluster
        self.left_out = left_out_now(context, self.settings.trials_task, cluster)
        for name, why in self.left_out.items():
            self.log.warning("This plan is without %s: %s", name, why)
        return present(cluster, self.left_out)

    def moment_of_deadline(self, context: Context) -> float | None:
        """When all has to be done, in seconds since the epoch."""
        if self.settings.deadline is None:
            return None
        began = pull_from_trials(context, self.settings.trials_task, "started")
        return self.settings.deadline.moment(began, context["dag"].timezone)

    def told(self, plan: Plan, cluster: Cluster, practice: Plan) -> dict[str, Any]:
        """The plan as the page and the report read it."""
        found = {
            **formats.stamp("a plan"),
            **plan.to_dict(),
            **cluster.to_dict(),
            "current_practice": practice.makespan,
            LEFT_OUT_KEY: self.left_out,
            **self.also_told,
        }
        if self.ends_by is not None:
            found["deadline"] = {"at": self.ends_by, "planned": self.meets_deadline}
        return dict(finite(found))


def check_team(settings: SweepSettings) -> None:
    """Look again at what the DAG asks for: what the deployment allows may have changed since it was parsed.

    :raises AirflowFailException: when the deployment does not let it have that.
    """
    try:
        deployed_teams().check(settings.team, settings.priority)
    except InvalidSweepError as error:
        raise AirflowFailException(str(error)) from None


def _stop(progress: Mapping[str, Progress], jobs: Iterable[str]) -> None:
    """Have the training of ``jobs`` write checkpoints and end, on whatever node."""
    alive = [run for job in jobs if (p := progress.get(job)) and (run := p.alive)]
    for run in alive:
        run.ask_to_stop()
    for run in alive:
        run.stop()
