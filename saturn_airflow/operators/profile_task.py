"""One trial as an Airflow task on its node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.launch import rights
from saturn_airflow.model import formats, initial_weights
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.core_use import CoreUse
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.folders import slug
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import memory_records
from saturn_airflow.operators.context import (
    SweepContext,
    finite,
    job_memory,
    leases_folder,
    pull_from_trials,
    technique_folders,
    user_path,
)
from saturn_airflow.operators.following import go_with_parent
from saturn_airflow.operators.making_claims import trial_name, trials_claim
from saturn_airflow.operators.retrying import TryAgainError
from saturn_airflow.operators.upstream_jobs import handed_on

ESTIMATE_KEY = "estimate"


class ProfileOperator(BaseOperator):
    """Measure one job under one technique on a number of devices, for all that share its fingerprint.

    Pushes ``estimate``: an ``estimate``, out of memory included, and ``broken``: why jobs that were found not
    to be fit for training are not, by their names. When the job itself is to blame, the next takes its place.
    """

    def __init__(
        self, *, trial: dict[str, Any], node: dict[str, Any], settings: SweepSettings, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.trial = trial
        self.node = node
        self.settings = settings
        self._uses: list[CoreUse] = []

    def execute(self, context: Context) -> None:
        """Run the trial.

        :raises DiskError: when the sweep's folder can't be written; a retry may find it mended.
        :raises AirflowFailException: when none of the jobs can be trained; why is in the log.
        """
        from saturn_airflow.profiling.blame import measured_with_any

        go_with_parent()
        sweep = SweepContext.of(context, self.settings.group)
        rights.check_may_write(sweep.folder)
        try:
            formats.check(self.trial, "a trial", "the trial of this task")
            trial = Trial.from_dict(self.trial)
        except SaturnError as error:
            raise AirflowFailException(str(error)) from None
        node = Node(**self.node)
        memory_records.record(node)
        names = ", ".join(trial.covers)
        self.log.info("Measuring %s x %d on %s for %s", trial.technique, trial.devices, node.name, names)
        jobs = jobs_of(trial, context, self.settings.trials_task)
        estimate, broken = measured_with_any(jobs, partial(self._measure, context, trial, node, sweep))
        entry = {**formats.stamp("an estimate"), "attempt": self.trial["attempt"], "broken": broken}
        if estimate is not None:
            entry["estimate"] = finite(estimate.to_dict())
        if self._uses:
            entry["cores"] = finite(self._uses[-1].to_dict())
        context["ti"].xcom_push(ESTIMATE_KEY, entry)
        for name, reason in broken.items():
            self.log.error("%s is left out: %s", name, reason)
        if estimate is None:
            raise AirflowFailException("; ".join(dict.fromkeys(broken.values())))
        self._tell(trial, estimate)

    def _measure(
        self,
        context: Context,
        trial: Trial,
        node: Node,
        sweep: SweepContext,
        job: Job,
        alike: Sequence[Job],
        on_broken: Callable[[str, str], object],
    ) -> Estimate:
        """Run the trial with ``job``, one of those it speaks for.

        :param alike: the other jobs of its fingerprint, whose own settings are tried in it, too.
        :param on_broken: called with the name of one that proves unfit for training, and why.
        """
        from saturn_airflow.profiling.measure import measure

        if job.name != trial.job.name:
            self.log.info("%s takes its place", job.name)
        what = trial_name(trial, job.name)
        try:
            handed = handed_on(job, self, context)
        except SaturnError as error:
            raise AirflowFailException(str(error)) from None
        return measure(
            dataclasses.replace(trial, job=job),
            node,
            alike=alike,
            on_broken=on_broken,
            on_use=self._uses.append,
            folder=sweep.folder / "trials" / slug(what),
            plain_steps=sweep.folder / "trials" / "plain steps",
            weights=initial_weights.file_of(sweep.folder, job.init_from),
            holder=f"{sweep.key}: trial of {job.name} under {trial.technique} x {trial.devices}",
            claim=trials_claim(trial, what, self.settings, sweep, self.trial["made"]),
            priority=(self.trial["made"], self.trial["position"]),
            leases_folder=leases_folder(),
            technique_folders=technique_folders(),
            path=user_path(),
            handed=handed,
            host_memory=job_memory(),
            log=self.log.info,
        )

    def _tell(self, trial: Trial, estimate: Estimate) -> None:
        if estimate.reason:
            self.log.info("%s x %d can't run: %s", trial.technique, trial.devices, estimate.reason)
        else:
            self.log.info(
                "%s x %d: %.4f s per batch (spread %.0f%%), %.1f s to set up, %.2f GiB per device",
                trial.technique,
                trial.devices,
                estimate.seconds_per_batch,
                100 * estimate.spread,
                estimate.launch_seconds + estimate.setup_seconds,
                estimate.peak_device_bytes / 2**30,
            )

    def on_kill(self) -> None:
        """End the trial now; a retry measures again.

        :raises TryAgainError: always.
        """
        raise TryAgainError("the trial was ended before it had measured anything")


def jobs_of(trial: Trial, context: Context, trials_task: str) -> list[Job]:
    """The jobs that ``trial`` speaks for, the one it is to be run with first."""
    others = [name for name in trial.covers if name != trial.job.name]
    if not others:
        return [trial.job]
    data = {job["name"]: job for job in pull_from_trials(context, trials_task, "jobs")}
    return [trial.job, *(Job.from_dict(data[name]) for name in others)]


def broken_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """The jobs that a trial found broken, each with the reason, from what its task pushed."""
    # What the version before pushed: one error for all jobs.
    alike = dict.fromkeys(entry.get("jobs", ()), entry.get("error", ""))
    return {**alike, **entry.get("broken", {})}
