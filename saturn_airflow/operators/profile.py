"""One trial as an Airflow task on its node."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from saturn_airflow.cluster import Node
from saturn_airflow.errors import JobError
from saturn_airflow.estimates import Trial
from saturn_airflow.folders import slug
from saturn_airflow.operators.context import (
    SweepContext,
    finite,
    leases_folder,
    technique_folders,
    user_path,
)
from saturn_airflow.operators.following import go_with_parent

ESTIMATE_KEY = "estimate"


class ProfileOperator(BaseOperator):
    """Measure one job under one technique on a number of devices.

    Pushes ``estimate``: the estimate, out of memory included, or the error of the job's own code.
    """

    def __init__(self, *, trial: dict[str, Any], node: dict[str, Any], group: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trial = trial
        self.node = node
        self.group = group

    def execute(self, context: Context) -> None:
        """Run the trial.

        :raises AirflowFailException: when the job's own code raises; its traceback is in the log.
        """
        from saturn_airflow.profiling.measure import measure

        go_with_parent()
        sweep = SweepContext.of(context, self.group)
        attempt, made, position = (self.trial[key] for key in ("attempt", "made", "position"))
        trial = Trial.from_dict(
            {key: value for key, value in self.trial.items() if key not in ("attempt", "made", "position")}
        )
        node = Node(**self.node)
        ti = context["ti"]
        names = ", ".join(trial.covers)
        self.log.info("Measuring %s x %d on %s for %s", trial.technique, trial.devices, node.name, names)
        try:
            estimate = measure(
                trial,
                node,
                folder=sweep.folder
                / "trials"
                / slug(f"{trial.job.name} {trial.technique} {trial.devices} {node.name}"),
                holder=f"{sweep.key}: trial of {trial.job.name} under {trial.technique} x {trial.devices}",
                priority=(made, position),
                leases_folder=leases_folder(),
                technique_folders=technique_folders(),
                path=user_path(),
                log=self.log.info,
            )
        except JobError as error:
            ti.xcom_push(ESTIMATE_KEY, {"attempt": attempt, "jobs": list(trial.covers), "error": str(error)})
            raise AirflowFailException(f"{names}: {error}") from None
        ti.xcom_push(ESTIMATE_KEY, {"attempt": attempt, "estimate": finite(estimate.to_dict())})
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
        """End the trial now; a retry measures again."""
        raise AirflowException("the trial was ended before it had measured anything")
