"""One job's training as an Airflow task on its node."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import Context, ResumableJobMixin
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.model import formats, initial_weights
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.entries import ENTRY, PlanEntry
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.formats import NewerFormatError
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.status import WORTH_A_RETRY, Status
from saturn_airflow.operators import beginning, cancelled, making_claims, memory_records
from saturn_airflow.operators.checkpoint_budgets import CheckpointBudgets
from saturn_airflow.operators.context import (
    SweepContext,
    finite,
    hide_secrets,
    home,
    job_memory,
    leases_folder,
    mlflow_uri,
    outlive_seconds,
    pull_from_trials,
    technique_folders,
    user_path,
)
from saturn_airflow.operators.following import FollowingOperator
from saturn_airflow.operators.live import live_of
from saturn_airflow.operators.numbers_for_airflow import LeaseWait
from saturn_airflow.operators.plan_order import wait_for_those_before
from saturn_airflow.operators.printed import OutputReader
from saturn_airflow.operators.progress_in_log import ProgressLog
from saturn_airflow.operators.retrying import TryAgainError, seconds_until_next_try
from saturn_airflow.operators.shared_clock import PlansClock
from saturn_airflow.operators.upstream_jobs import handed_on
from saturn_airflow.plugin.links import MlflowRunLink

if TYPE_CHECKING:
    from saturn_airflow.launch.restarting import Asker, RestartDecision
    from saturn_airflow.launch.runs import Run, RunSpec
    from saturn_airflow.tracking import JobRun

OUTCOME_KEY = "outcome"
#: How long training may take to end its step and write a checkpoint when it is told to stop; its task may be
#: gone before, for Airflow leaves that five seconds.
STOP_SECONDS = 30.0
#: So often, and `retries`, the folder of a run may be taken away before its job has failed.
_MOST_TAKEN_AWAY = 3


class TrainOperator(ResumableJobMixin, FollowingOperator):
    """Train one job of a plan on the devices the plan gave it.

    Training runs in processes of its own, which this task follows. When the task ends before them, a retry
    follows them on; when there are none, it starts them again from the job's last checkpoint. Pushes
    ``outcome``: how it ended, with the last losses, the seconds it took, and where the model is.

    :param execution_timeout: Airflow's counts waiting too; here it means the sweep's ``job_timeout``, where
        that is not given.
    """

    operator_extra_links = (MlflowRunLink(),)
    external_id_key = "saturn_run"

    def __init__(
        self,
        *,
        entry: dict[str, Any],
        node: dict[str, Any],
        settings: SweepSettings,
        execution_timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(execution_timeout=None, **kwargs)
        self.settings = settings
        self.job_timeout = settings.job_timeout
        if self.job_timeout is None and execution_timeout is not None:
            self.job_timeout = execution_timeout.total_seconds()
        self.entry = PlanEntry.from_dict(entry)
        self._handed_on = entry
        self.node = node
        self.mlflow_url: str | None = None
        self._job_run: JobRun | None = None
        self._outcome: Outcome | None = None
        self._decided: RestartDecision | None = None
        self._warnings: tuple[str, ...] = ()
        self.clock = PlansClock()

    def execute(self, context: Context) -> dict[str, Any]:
        """Train, or follow the training that an earlier try began.

        :raises TryAgainError: when training ended without finishing, or this task must go before it; a
            retry goes on.
        :raises DiskError: when the job's folder can't be written; a retry may find it mended.
        :raises AirflowFailException: when no retry can help: the loss is not a number, memory ran out, the
            job failed too often; or when nobody wants the training any more.
        """
        from saturn_airflow.launch import followers, rights

        folder = SweepContext.of(context, self.settings.group).job_folder(self.entry.name)
        rights.check_may_write(folder)
        words = "Waiting for an earlier try of this task to let go of the training"
        with followers.sole_follower(folder, self.must_go, lambda: self.log.info(words)) as alone:
            if not alone:
                raise TryAgainError(f"{self.entry.name}: an earlier try has not let go of it yet")
            try:
                self._begin(context, folder)
                self.execute_resumable(context)
            finally:  # the next try sends what is left
                if self._job_run is not None:
                    self._job_run.stop_sending()
        return self._returned()

    def _begin(self, context: Context, folder: Path) -> None:
        """Decide whether the job goes on; where it starts anew, set aside what was trained.

        :raises AirflowFailException: when what is there can't be read by this version.
        """
        try:
            formats.check(self._handed_on, ENTRY, "the entry of this task")
            self._decided = beginning.decide(context, folder, self, self._asker(context))
        except (InvalidSweepError, NewerFormatError) as error:
            self._refuse(context, str(error))
        if self._decision.why_anew is not None:
            beginning.supersede(folder, self._decision.why_anew, mlflow_uri(self.settings.mlflow_conn_id))
        self._warnings = tuple(beginning.warnings(self.entry.name, folder, self._decision))

    @property
    def _decision(self) -> RestartDecision:
        assert self._decided is not None, "execute decides first"
        return self._decided

    def submit_job(self, context: Context) -> str:
        """Start training, after what earlier runs said has been passed on; the run's folder."""
        from saturn_airflow.launch import restarting, runs

        spec, end = self._spec(context), None
        for run in runs.all_of(spec.folder):
            if run.is_alive():
                if self._may_follow(run):
                    self.log.info("Reconnecting to the training in %s", run.folder)
                    return str(run.folder)
                self.log.info("Waiting for the earlier training in %s to stop", run.folder)
                run.stop()
            end = self._pass_on(context, run)
            if end is None:  # it has not stopped yet, and this task must go
                self._leave(context, run)
            if end["status"] != Status.FINISHED and not self._may_go_on(context, run, end):
                run.give_up()
                raise AirflowFailException(self._conclude(context, run, end).reason)
            run.done_with()
        if end is not None and end["status"] == Status.FINISHED and not self._decision.changes:
            return str(run.folder)
        wait_for_those_before(context, self.settings, self.entry, self.must_go)
        self._budgets(context).keep()
        try:
            started = runs.start(spec, handed_on(spec.job, self, context))
        except InvalidSweepError as error:
            self._refuse(context, str(error))
        restarting.forget_wish(Path(spec.folder))
        return str(started.folder)

    def _refuse(self, context: Context, reason: str) -> NoReturn:
        self._push(context, Outcome.of(self.entry, Status.FAILED, reason))
        raise AirflowFailException(reason) from None

    def get_job_status(self, external_id: Any, context: Context) -> str:
        """``running``, or how the run ended; ``superseded`` when another is to be started."""
        run = _run(external_id)
        if not run.exists() or not self._may_follow(run):
            return "superseded"
        end = run.end
        return "running" if end is None else str(end["status"])

    def is_job_active(self, status: str) -> bool:
        """Whether training goes on."""
        return status == "running"

    def is_job_succeeded(self, status: str) -> bool:
        """Whether it finished while nobody followed it."""
        return status == Status.FINISHED

    def poll_until_complete(self, external_id: Any, context: Context) -> None:
        """Follow the run to its end, or until this task must go."""
        run = _run(external_id)
        self._ended(context, run, self._pass_on(context, run))

    def _ended(self, context: Context, run: Run, end: dict[str, Any] | None) -> None:
        """Make of the run's end what this task ends with; without one, this task must go before it."""
        if end is None:
            self._leave(context, run)
        if not run.exists():
            self._was_taken_away(context, end["reason"])
        self._outcome = self._conclude(context, run, end)
        if self._outcome.status == Status.FINISHED:
            return
        message = f"{run.spec.job.name} {self._outcome.status.in_words}: {end['reason']}"
        if self._is_worth_a_retry(context, end):
            raise TryAgainError(message, seconds_until_next_try(Path(run.spec.folder), end["status"]))
        if end["status"] != Status.STOPPED:
            run.give_up()
        raise AirflowFailException(message)

    def _was_taken_away(self, context: Context, reason: str) -> NoReturn:
        """Try again where the run's folder is gone, and with it what tells how often that was; Airflow keeps
        the number, for a job's own code may do it each time."""
        store, key = context.get("task_state_store"), f"saturn_taken_{self._asker(context).cleared_after}"
        before = None if store is None else store.get(key)
        times = 1 + (before if isinstance(before, int) else 0)
        if store is not None:
            store.set(key, times)
        if times > self.settings.retries + _MOST_TAKEN_AWAY:
            self._refuse(context, f"{reason}, {times} times by now: does the job's own code do it?")
        raise TryAgainError(f"{self.entry.name}: {reason}; it goes on from what is left")

    def must_let_go(self) -> bool:
        """Whether to follow no longer, though training goes on."""
        return self.must_go()

    def watch(self, event: dict[str, Any]) -> None:
        """Look at an event of training; here nothing is made of it."""

    def get_job_result(self, external_id: Any, context: Context) -> dict[str, Any]:
        """The outcome of a run that has ended."""
        if self._outcome is None:
            self.poll_until_complete(external_id, context)
        return self._returned()

    def _spec(self, context: Context) -> RunSpec:
        from saturn_airflow.launch import runs

        sweep = SweepContext.of(context, self.settings.group)
        entry, node, job = self.entry, Node(**self.node), self.entry.job
        memory_records.record(node)
        return runs.RunSpec(
            mode="train",
            job=job,
            technique=entry.technique,
            parameters=entry.parameters,
            verdict=entry.verdict,
            own_code=entry.own_code,
            version=entry.version,
            node=node.name,
            kind=node.kind,
            slots=node.devices,
            devices=entry.devices,
            device_ids=entry.device_ids,
            priority=entry.priority,
            holder=f"{sweep.key}: {job.name}",
            folder=str(sweep.job_folder(job.name)),
            checkpoint_seconds=self.settings.checkpoint_every,
            keep_checkpoints=self.settings.keep_checkpoints,
            leases_folder=leases_folder(),
            technique_folders=technique_folders(),
            path=user_path(),
            most_seconds=self._seconds_left(context, sweep.job_folder(job.name)),
            stop_seconds=STOP_SECONDS,
            outlive_seconds=outlive_seconds(),
            try_number=context["ti"].try_number,
            definition=self._decision.definition.to_dict(),
            goes_on_from=self._decision.goes_on_from,
            initial_weights=initial_weights.file_of(sweep.folder, job.init_from),
            claim=making_claims.claim(
                entry, self.settings, sweep, anew=bool(self._decision.changes), ahead=self.clock.ahead()
            ),
            strategies=(*making_claims.strategies(entry), *entry.instead),
            warnings=self._warnings,
            host_memory=job_memory(),
            home=str(home()),
        )

    def _seconds_left(self, context: Context, folder: Path) -> float | None:
        """How long the job may still have devices."""
        from saturn_airflow.launch import past_runs

        if self.job_timeout is None:
            return None
        had = past_runs.time_on_devices(folder, self._asker(context).goes_on_with).get("actual_seconds", 0.0)
        return max(0.0, self.job_timeout - had)

    def _held(self, folder: Path) -> dict[str, float]:
        """When the job had its devices, by the clock of who planned, and for how long."""
        from saturn_airflow.launch import past_runs

        held = past_runs.time_on_devices(folder)
        return {name: value - self.clock.ahead() * name.endswith("_at") for name, value in held.items()}

    def _push(self, context: Context, outcome: Outcome) -> None:
        """Say what has become of the job so far."""
        context["ti"].xcom_push(OUTCOME_KEY, finite(outcome.to_dict()))

    def _returned(self) -> dict[str, Any]:
        """The outcome, as this task returns it."""
        return {} if self._outcome is None else dict(finite(self._outcome.to_dict()))

    def _is_of_this_plan(self, run: Run) -> bool:
        return run.spec.priority == self.entry.priority

    def _may_follow(self, run: Run) -> bool:
        """Whether this task can make the run's end its own."""
        stops = run.is_told_to_stop() and run.is_alive()
        return self._is_of_this_plan(run) and not self._decision.changes and not stops

    def _may_go_on(self, context: Context, run: Run, end: dict[str, Any]) -> bool:
        """Whether this try may go on after a run that ended so."""
        return not self._asker(context).goes_on_with(run) or self._is_worth_a_retry(context, end)

    def _is_worth_a_retry(self, context: Context, end: dict[str, Any]) -> bool:
        from saturn_airflow.launch import past_runs

        ti = context["ti"]
        folder = SweepContext.of(context, self.settings.group).job_folder(self.entry.name)
        failures = past_runs.failures(folder, self._asker(context).goes_on_with, node=self.entry.node)
        tries_left = ti.try_number <= (ti.max_tries or 0) and failures <= self.settings.retries
        # What others have filled may be free by then.
        return (end["status"] in WORTH_A_RETRY or bool(end.get("occupied"))) and tries_left

    def _asker(self, context: Context) -> Asker:
        return beginning.asker_of(self.entry, context["ti"], self.retries or 0)

    def _pass_on(self, context: Context, run: Run) -> dict[str, Any] | None:
        """Tell MLflow and the log what the run says; how it ended, None if this task must go before that."""
        run.read_on()
        live = live_of(context["ti"], self.entry, run.spec.folder, self.clock)
        budgets = self._budgets(context)
        waits = LeaseWait({"dag_id": context["ti"].dag_id, "node": self.entry.node})
        progress_log = ProgressLog(self.log, self.entry.node)
        printed = OutputReader(run.log, progress_log.job_prints)

        def must_let_go() -> bool:
            printed.look()
            live.tell_now_and_again()
            return self.must_let_go()

        end = None
        for event in run.events(
            give_up=must_let_go, kept=lambda: self._job_run is None or self._job_run.is_kept
        ):
            if event["event"] == "end":
                printed.close()
                end = event
            progress_log.tell(event)
            live.hear([event])
            budgets.hear(event)
            waits.hear(event)
            self.watch(event)
            if event["event"] != "waiting":
                self._mlflow(context).follow(event)
        live.close()
        if end is not None and self._job_run is not None:
            self._job_run.check_kept()
        return end or run.end

    def _budgets(self, context: Context) -> CheckpointBudgets:
        folder = SweepContext.of(context, self.settings.group).folder
        return CheckpointBudgets(folder, self.settings.checkpoints_budget, self.log.info, self.log.warning)

    def _mlflow(self, context: Context) -> JobRun:
        from saturn_airflow import tracking
        from saturn_airflow.launch import restarting

        if self._job_run is None:
            sweep = SweepContext.of(context, self.settings.group)
            entry, job = self.entry, self.entry.job
            parent = pull_from_trials(context, self.settings.trials_task, "sweep")
            params = hide_secrets(
                tracking.job_params(job, technique=entry.technique, devices=entry.devices, node=entry.node)
            )
            folder, uri = sweep.job_folder(job.name), mlflow_uri(self.settings.mlflow_conn_id)
            tags = sweep.tags(context) | tracking.job_tags(job)
            if self._decided is not None:
                tags |= {"saturn.definition": self._decided.definition.hash}
            number = restarting.number(folder)
            tracking.go_on(uri, parent, sweep.folder, patience=1.0)
            self._job_run = tracking.open_job(uri, parent, job.name, params, tags, folder, number)
        return self._job_run

    def _leave(self, context: Context, run: Run) -> NoReturn:
        """Leave a run that goes on: to the next try, or, where nobody wants it any more, stop it first."""
        from saturn_airflow.launch import restarting

        name = run.spec.job.name
        if self.is_orphan():
            # Nobody hears what this process says, and the next try waits for it to be gone.
            os._exit(1)
        if self.is_wanted(context["ti"]):
            raise TryAgainError(f"{name} trains on without this task; the next try follows it")
        self.log.info("Airflow does not want this task any more: training writes a checkpoint and ends")
        # What must be known later is said at once: Airflow may end this process before training has ended.
        restarting.conclude(run, self._asker(context), wanted=False)
        run.ask_to_stop()
        stopped = Outcome.of(self.entry, Status.STOPPED, "the task was stopped")
        self._push(context, stopped)
        cancelled.end_with_dag_run(context, self.settings, self._job_run, self.log.warning)
        run.stop()
        end = self._pass_on(context, run)
        if end is not None:
            if end["status"] != Status.FINISHED:
                end = {**end, "reason": end["reason"] or stopped.reason}
            self._conclude(context, run, end, wanted=False)
        raise AirflowFailException(f"{name} was stopped")

    def _conclude(self, context: Context, run: Run, end: dict[str, Any], wanted: bool = True) -> Outcome:
        """Push the outcome, and close the job's MLflow run unless it will be gone on with."""
        from saturn_airflow.launch import past_runs, restarting

        outcome = Outcome.of(
            self.entry,
            end["status"],
            end["reason"],
            result=past_runs.result_of(run.spec.folder, end),
            held=self._held(Path(run.spec.folder)),
            training=restarting.number(Path(run.spec.folder)),
        )
        # What became of the job must not depend on MLflow; its run and model are added when they are known.
        self._push(context, outcome)
        if outcome.held is not None:
            goes_on = self._is_worth_a_retry(context, end) and not self.must_go()
            outcome = self._close(context, outcome, outcome.held.actual_seconds, goes_on)
            self._push(context, outcome)
        run.done_with()
        restarting.conclude(run, self._asker(context), wanted=wanted)
        return outcome

    def _close(self, context: Context, outcome: Outcome, held: float, goes_on: bool) -> Outcome:
        """The outcome with its run and its model in MLflow.

        :param held: seconds that the job had its devices.
        """
        planned = outcome.planned
        assert planned is not None, "what had devices was planned"
        job_run = self._mlflow(context)
        job_run.wait(10)
        self.mlflow_url = job_run.url
        uri = job_run.log_model_folder(outcome.model) if outcome.model else None
        hours = held * planned.devices / 3600
        found = {"planned_seconds": planned.planned_seconds, "actual_seconds": held, "device_hours": hours}
        job_run.log_metrics(found)
        if goes_on:
            job_run.leave()
        else:
            kept = outcome.status in (Status.FINISHED, Status.STOPPED)
            job_run.close(outcome.status if kept else Status.FAILED, outcome.reason)
        return dataclasses.replace(outcome, run_id=job_run.id, model_uri=uri)


def _run(external_id: Any) -> Run:
    from saturn_airflow.launch import runs

    return runs.Run(Path(str(external_id)))
