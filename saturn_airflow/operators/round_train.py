"""One job's training in one round of a sweep."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import Context
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.status import Status
from saturn_airflow.operators.context import SweepContext, use_techniques_folder
from saturn_airflow.operators.deadline_watch import DeadlineWatch
from saturn_airflow.operators.round_reserve import skip_watch_after_last
from saturn_airflow.operators.round_watch import over_file
from saturn_airflow.operators.shared_clock import PlansClock
from saturn_airflow.operators.train_task import TrainOperator

if TYPE_CHECKING:
    from saturn_airflow.launch.runs import Run, RunSpec

#: So many batches show how fast a job is; the first are slow.
ENOUGH_STEPS = 8


class RoundTrainOperator(TrainOperator):
    """Train one job until it is done, or the round ends; a sweep that is planned once is one round.

    At the boundary this task succeeds and training goes on without it: the next plan stops only jobs that it
    moves, and the next round's task follows on those that stay. A job whose turn has not come is skipped (its
    run goes on waiting for its devices), and so is one that was pruned. The outcome's ``status`` then is
    ``going_on``, ``paused`` (at a rung of the selection), ``waiting`` or ``pruned``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._over_file: Path | None = None
        self._steps_seen = 0
        self._deadline: DeadlineWatch | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Train.

        :raises AirflowSkipException: when the job was pruned, or its turn did not come in this round.
        """
        if self.entry.pruned:
            self._prune(context)
        sweep = SweepContext.of(context, self.settings.group)
        self.clock = PlansClock(sweep.folder, self.entry.ahead)
        self._over_file = over_file(sweep, self._round, self.entry.attempt)
        if self._is_round_over() and not self.entry.goes_on:
            self._wait_for_next(context)
        if self.entry.deadline is not None:
            function = self.settings.on_missed_deadline
            self._deadline = DeadlineWatch(context, sweep, self.entry.attempt, function, self.clock)
        try:
            told = super().execute(context)
        except AirflowFailException:
            self._skip_watch(context)
            raise
        finally:
            if self._deadline is not None:
                self._deadline.close()
        self._skip_watch(context)
        return told

    def _skip_watch(self, context: Context) -> None:
        """Let nobody wait for the watch where all training has ended, nor for the round in reserve where this
        is the last round and no node was lost."""
        most = self.settings.rounds.most
        if self._round <= most < self.settings.last_round:
            reserve = self._round == most and not self._is_round_over()
            skip_watch_after_last(context, self.settings, self._round, self.node["name"], reserve)

    def submit_job(self, context: Context) -> str:
        """The run that goes on from the round before, or a new one."""
        name = super().submit_job(context)
        if self.entry.moved_from:
            self._tag_move(context)
        return name

    def must_let_go(self) -> bool:
        """Whether this task was told to go, or the round is over."""
        if self._deadline is not None:
            self._deadline.look()
        return self.must_go() or self._is_round_over()

    def watch(self, event: dict[str, Any]) -> None:
        """End the round for all if this job is going to end far from when it was planned to."""
        if event["event"] != "step" or event.get("eta_seconds") is None or self._over_file is None:
            return
        entry, policy = self.entry, self.settings.rounds
        self._steps_seen += 1
        if self._steps_seen < ENOUGH_STEPS or self._round >= policy.most:
            return
        assert entry.batches is not None
        assert entry.planned_makespan is not None
        besides = entry.besides_seconds * (1 - event["step"] / entry.batches)
        expected = event["time"] - self.clock.ahead() + event["eta_seconds"] + besides - entry.attempt
        strayed = policy.strayed(expected, entry.end, entry.planned_makespan)
        if strayed and not self._over_file.exists():
            self.log.info("Ends after %.0f s instead of %.0f: the round is over", expected, entry.end)
            self._over_file.touch()

    @property
    def _round(self) -> int:
        return self.entry.round or 1

    def _spec(self, context: Context) -> RunSpec:
        entry, spec = self.entry, super()._spec(context)
        left = None
        if entry.most_batches is not None:
            left = max(0, entry.most_batches - self._batches_before(spec))
        return dataclasses.replace(
            spec, batch_count=left, total_batches=entry.batches, batches_per_epoch=entry.per_epoch or None
        )

    @staticmethod
    def _batches_before(spec: RunSpec) -> int:
        """The batches from which the run goes on: those of the last checkpoint; what was trained since is
        lost."""
        from saturn_airflow import library
        from saturn_airflow.launch import past_runs

        use_techniques_folder()
        with contextlib.suppress(InvalidSweepError):  # the run says so
            if library.get(spec.technique).trains_by_itself:
                return past_runs.steps_by_itself(spec.folder, spec.technique)
        saved = past_runs.last_checkpoint(spec.folder)
        return int(saved["step"]) if saved else 0

    def _is_of_this_plan(self, run: Run) -> bool:
        goes_on = self.entry.goes_on
        return super()._is_of_this_plan(run) or (goes_on is not None and run.spec.priority == goes_on)

    def _is_round_over(self) -> bool:
        if self.entry.ends_at is not None and time.time() - self.clock.ahead() >= self.entry.ends_at:
            return True
        return self._over_file is not None and self._over_file.exists()

    def _is_at_rung(self, end: dict[str, Any]) -> bool:
        most, steps = self.entry.most_batches, (end["result"] or {}).get("steps", 0)
        return most is not None and end["status"] == Status.STOPPED and steps >= most

    def _ended(self, context: Context, run: Run, end: dict[str, Any] | None) -> None:
        """As :meth:`TrainOperator._ended`; besides, the round may be over, or the job at its rung."""
        if end is None and not self.must_go():
            self._end_round(context, run)
        elif end is not None and self._is_at_rung(end):
            self._outcome = self._leave_open(context, Status.PAUSED, end.get("result") or {})
            run.done_with()
        else:
            super()._ended(context, run, end)

    def _end_round(self, context: Context, run: Run) -> None:
        """The round is over for this job, whose run goes on: training, or waiting for its devices."""
        from saturn_airflow.launch import progress

        so_far = progress.of(run.spec.folder)
        if so_far.alive is not None and not so_far.training:
            # It keeps its place in the queue, so that no device is idle while the next round is planned.
            self._wait_for_next(context)
        self.log.info("The round is over; training goes on until the next plan says otherwise")
        self._outcome = self._leave_open(context, Status.GOING_ON, {"steps": so_far.steps})

    def _leave_open(self, context: Context, status: Status, result: dict[str, Any]) -> Outcome:
        """Push an outcome of a job that a later round goes on with."""
        held = self._held(SweepContext.of(context, self.settings.group).job_folder(self.entry.name))
        outcome = Outcome.of(self.entry, status, result=result, held=held)
        self._push(context, outcome)
        job_run = self._mlflow(context)
        job_run.wait(10)
        self.mlflow_url = job_run.url
        job_run.leave()
        return outcome

    def _wait_for_next(self, context: Context) -> NoReturn:
        outcome = Outcome.of(self.entry, Status.WAITING, "its turn did not come in this round")
        self._push(context, outcome)
        raise AirflowSkipException(f"{outcome.job}: {outcome.reason}")

    def _prune(self, context: Context) -> NoReturn:
        from saturn_airflow.launch import runs

        folder = SweepContext.of(context, self.settings.group).job_folder(self.entry.name)
        held = self._held(folder)
        outcome = Outcome.of(self.entry, Status.PRUNED, self.entry.pruned, held=held)
        for run in runs.all_of(folder):
            self._pass_on(context, run)
            run.done_with()
        job_run = self._mlflow(context)
        job_run.wait(10)
        self.mlflow_url = job_run.url
        job_run.close(Status.PRUNED, outcome.reason)
        self._push(context, dataclasses.replace(outcome, run_id=job_run.id))
        raise AirflowSkipException(f"{outcome.job}: {outcome.reason}")

    def _tag_move(self, context: Context) -> None:
        """Say in MLflow that the job goes on elsewhere."""
        entry = self.entry
        ids = ",".join(map(str, entry.device_ids))
        to = f"{entry.technique} x {entry.devices} on {entry.node}[{ids}]"
        self.log.info("Moved from %s to %s", entry.moved_from, to)
        self._mlflow(context).tag({f"saturn.moved.round_{self._round}": f"{entry.moved_from} -> {to}"})
