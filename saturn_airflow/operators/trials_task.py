"""The first task of a sweep: check the jobs, open the sweep's run, and list what must be measured."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context, XComArg
from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException

from saturn_airflow.launch import rights
from saturn_airflow.model import clear_secrets, formats, json_text
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job
from saturn_airflow.operators import (
    cancelled,
    checked_jobs,
    connections,
    first_weights,
    measuring,
    memory_records,
    upstream_jobs,
    wishes,
)
from saturn_airflow.operators.context import (
    SweepContext,
    mlflow_uri,
)
from saturn_airflow.operators.executors import check_executor
from saturn_airflow.operators.inventory import warn_of_no_pool
from saturn_airflow.operators.leftovers import send_unsent
from saturn_airflow.operators.others import tell_of_trials
from saturn_airflow.operators.presence import LEFT_OUT_KEY, absent, present
from saturn_airflow.operators.standing import any_stands
from saturn_airflow.operators.wave_tasks import WaveOperator, listed, quick_solve
from saturn_airflow.operators.xcom_parts import ListingOperator
from saturn_airflow.plugin.links import MlflowRunLink

if TYPE_CHECKING:
    from saturn_airflow.model.estimates import Estimate, Key
    from saturn_airflow.profiling.knowledge import Knowledge

_LISTED = "a note of listed trials"


class TrialsOperator(WaveOperator):
    """List the first trials a sweep needs.

    Pushes ``jobs`` (the jobs, rendered and checked), ``refusals`` (techniques that say why they can't train
    a job), ``left_out`` (nodes that take no part, with the reasons), ``known`` (estimates from earlier
    sweeps), ``sweep`` (its MLflow run), ``started`` and ``attempt`` (what later tasks know this attempt's
    results by; the time at which this task had done its part).
    """

    template_fields: Sequence[str] = ("jobs",)
    operator_extra_links = (MlflowRunLink(),)

    def __init__(self, *, jobs: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.jobs = jobs
        self.from_upstream = isinstance(jobs, XComArg)
        self.mlflow_url: str | None = None
        #: The task that uses what was measured.
        self.plan_task: str | None = None

    def render_template_fields(self, context: Context, jinja_env: Any = None) -> None:
        """Render the jobs' texts.

        :raises InvalidSweepError: when a template names something that this DAG run does not have.
        """
        from jinja2 import UndefinedError

        try:
            super().render_template_fields(context, jinja_env)
        except UndefinedError as error:
            without = getattr(context.get("dag_run"), "logical_date", None) is None
            fix = (
                "; this DAG run was triggered without a logical date, and has neither ds nor ts: write "
                "{{ dag_run.run_after | ds }}, or give it a date (airflow dags trigger --logical-date)"
            )
            raise InvalidSweepError(
                f"a template in the sweep's jobs can't be rendered: {error}{fix if without else ''}"
            ) from None

    def list_trials(self, context: Context) -> list[dict[str, Any]]:
        """The first trials."""
        from saturn_airflow import tracking
        from saturn_airflow.profiling.knowledge import Knowledge
        from saturn_airflow.profiling.trials import strategies

        started = time.time()
        settings = self.settings
        sweep = SweepContext.of(context, settings.group)
        rights.check_may_write(sweep.folder)
        try:
            jobs = self._checked_jobs(context)
            cluster, left_out = self._nodes()
            uri = mlflow_uri(settings.mlflow_conn_id)
            jobs = first_weights.settled(jobs, lambda: uri, sweep.folder, self.log.info)
            known = [] if settings.profile == "fresh" else earlier_estimates(uri, jobs)
            knowledge = Knowledge.of(
                jobs, cluster, settings.techniques, known, memory=memory_records.learned()
            )
            _, refusals = strategies(jobs, cluster, settings.techniques)
            wave = [] if settings.profile == "never" else self._wave(knowledge)
            attempt = self.attempt_now(context, sweep)
            trials = listed(wave, knowledge, attempt)
        except InvalidSweepError as error:
            raise AirflowFailException(str(error)) from None
        self._wait_for_another(context, sweep, {trial["fingerprint"] for trial in trials})

        experiment = settings.experiment or sweep.dag_id
        run = tracking.open_sweep(
            uri,
            experiment,
            f"{sweep.group_id} {sweep.run_id}",
            {"saturn.sweep": sweep.key, **sweep.tags(context)},
            {"jobs": len(jobs), "nodes": len(cluster), "devices": cluster.devices},
            sweep.folder,
        )
        self.mlflow_url = run.url
        cancelled.end_earlier(context, uri, experiment, self.dag.task_ids, self.log.info)
        told = {
            "jobs": [job.to_dict() for job in jobs],
            LEFT_OUT_KEY: left_out,
            "refusals": [vars(refusal) for refusal in refusals],
            "known": [estimate.to_dict() for estimate in knowledge.known.values()],
            "sweep": run.to_dict(),
            "started": started,
            "attempt": attempt,
        }
        for key, value in told.items():
            context["ti"].xcom_push(key, value)
        tell_of_trials(sweep, settings, trials, cluster)
        self._say(knowledge, wave, left_out, len(trials))
        return trials

    def attempt_now(self, context: Context, sweep: SweepContext) -> float:
        """What later tasks know this attempt's results by: as before where this task was cleared alone, since
        what was measured by its list counts.

        :raises NewerFormatError: when a newer version noted it in a way that this one can't read.
        """
        path = sweep.folder / "trials.listed"
        if any_stands(context["ti"], self.downstream_task_ids):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                told = json_text.parse(path.read_text())
                formats.check(told, _LISTED, path)
                return float(told["attempt"])
        attempt = time.time()
        with contextlib.suppress(OSError):  # a full disk keeps none from measuring
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({**formats.stamp(_LISTED), "attempt": attempt}))
        return attempt

    def _checked_jobs(self, context: Context) -> list[Job]:
        """The sweep's jobs.

        :raises InvalidSweepError: when something about them can't be right.
        """
        given = [] if self.jobs is None else self.jobs
        if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
            raise InvalidSweepError(
                f"jobs is {given!r:.60}; the upstream task has to return a list of what Job.to_dict() returns"
            )
        jobs = [job if isinstance(job, Job) else Job.from_dict(job) for job in given]
        checked_jobs.check(jobs, self.settings)
        if self.from_upstream:
            upstream_jobs.check(jobs, self.dag.fileloc)
        connections.handed_to(*jobs)  # what is missing is told before anything runs
        for message in clear_secrets.warnings(jobs):
            self.log.warning("%s", message)
        wishes.check(wishes.conf_of(context), [job.name for job in jobs])
        return jobs

    def _nodes(self) -> tuple[Cluster, dict[str, str]]:
        """The nodes that take part, and why each of the others does not."""
        cluster = self.settings.cluster
        check_executor(cluster, self.log.warning)
        left_out = absent(cluster, self.settings.on_missing_node, self.log.info)
        cluster = present(cluster, left_out)
        warn_of_no_pool(cluster, self.log.warning)
        return cluster, left_out

    def _say(
        self, knowledge: Knowledge, wave: Sequence[Key], left_out: Mapping[str, str], trials: int
    ) -> None:
        for estimate in knowledge.known.values():
            if estimate.stale:
                self.log.info("%s x %d: %s", estimate.technique, estimate.devices, estimate.stale)
        for name, why in left_out.items():
            self.log.warning("%s takes no part in this sweep: %s", name, why)
        self.log.info(
            "%d jobs on %s: %d estimates are known from earlier sweeps, %d trials come first",
            len(knowledge.jobs),
            ", ".join(f"{n.name} ({n.devices} x {n.kind})" for n in knowledge.cluster),
            len(knowledge.known),
            trials,
        )

    def _wait_for_another(self, context: Context, sweep: SweepContext, fingerprints: set[str]) -> None:
        """Come back later where another run of this DAG measures the same just now."""
        if not fingerprints or self.settings.profile != "auto" or self.plan_task is None:
            return
        if other := measuring.who_measures(context, sweep, self.plan_task, fingerprints):
            self.log.info("%s is measuring some of these jobs: waiting for its plan", other)
            again = timedelta(seconds=measuring.LOOK_AGAIN_SECONDS)
            raise AirflowRescheduleException(datetime.now(timezone.utc) + again)  # type: ignore[no-untyped-call]

    def _wave(self, knowledge: Knowledge) -> list[Key]:
        from saturn_airflow.profiling import waves

        # Where something is known of each job, the plan can say at once what else is worth measuring.
        return waves.first_wave(knowledge) or waves.next_wave(
            knowledge, quick_solve(self.settings.planning_seconds), worth=waves.WORTH_AGAIN
        )


def earlier_estimates(uri: str, jobs: Sequence[Job]) -> list[Estimate]:
    """What earlier sweeps know of these jobs; what MLflow has not taken from those is sent to it first."""
    from saturn_airflow import tracking
    from saturn_airflow.profiling.fingerprints import fingerprint, speed_versions
    from saturn_airflow.profiling.options import still_known

    unsent = send_unsent(uri)
    marks = sorted({fingerprint(job) for job in jobs})
    return still_known(jobs, tracking.estimate_store.find(uri, marks, speed_versions(), unsent))


class PickOperator(ListingOperator):
    """Hand out one node's part of a list, since Airflow maps over a task's whole return value only."""

    template_fields: Sequence[str] = ("items",)

    def __init__(self, *, items: Any, node: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.items = items
        self.node = node

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Return the items of this node, in order."""
        return [item for item in self.items if item["node"] == self.node]
