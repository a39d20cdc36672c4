"""One job's training as an Airflow task on its node."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from saturn_airflow.cluster import Node
from saturn_airflow.errors import InvalidSweepError
from saturn_airflow.jobs import Job
from saturn_airflow.operators.context import (
    SweepContext,
    finite,
    hide_secrets,
    leases_folder,
    mlflow_uri,
    pull_from_trials,
    technique_folders,
    user_path,
)
from saturn_airflow.plugin.links import MlflowRunLink

OUTCOME_KEY = "outcome"
#: Seconds between lines of progress in the task's log.
LOG_SECONDS = 10.0
#: What a further try may mend, from the last checkpoint on. The job's own code is given another try too: data
#: that can't be reached for a moment is the commonest failure of a long training.
WORTH_A_RETRY = ("stopped", "lost", "hung", "failed")


class TrainOperator(BaseOperator):
    """Train one job of a plan on the devices the plan gave it.

    A retried task goes on from the job's last checkpoint. Pushes ``outcome``: how it ended, with the last
    losses, the seconds it took, and where the model is.
    """

    operator_extra_links = (MlflowRunLink(),)

    def __init__(
        self,
        *,
        entry: dict[str, Any],
        node: dict[str, Any],
        trials_task: str,
        checkpoint_seconds: float,
        keep_checkpoints: int,
        group: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.entry = entry
        self.node = node
        self.trials_task = trials_task
        self.checkpoint_seconds = checkpoint_seconds
        self.keep_checkpoints = keep_checkpoints
        self.group = group
        self.mlflow_url: str | None = None
        self._run: Any = None
        self._said_at = 0.0

    def execute(self, context: Context) -> dict[str, Any]:
        """Train.

        :raises AirflowException: when training ended without finishing; a retry resumes it.
        :raises AirflowFailException: when no retry can help: the loss is not a number, memory ran out.
        """
        from saturn_airflow import tracking
        from saturn_airflow.training import runs

        ti = context["ti"]
        sweep = SweepContext.of(context, self.group)
        entry, node = self.entry, Node(**self.node)
        job = Job.from_dict(entry["job"])
        folder = sweep.job_folder(job.name)
        outcome = {
            key: entry[key]
            for key in ("attempt", "technique", "devices", "node", "device_ids", "kind", "parameters")
        }
        outcome.update(
            job=job.name,
            fingerprint=entry["fingerprint"],
            planned_seconds=entry["end"] - entry["start"],
            status="lost",
            reason="the task was ended",
        )
        try:
            uri = mlflow_uri()
            parent = pull_from_trials(context, self.trials_task, "sweep")
            spec = runs.RunSpec(
                mode="train",
                job=job,
                technique=entry["technique"],
                parameters=entry["parameters"],
                node=node.name,
                kind=node.kind,
                slots=node.devices,
                devices=entry["devices"],
                device_ids=tuple(entry["device_ids"]),
                priority=(entry["attempt"], entry["position"]),
                holder=f"{sweep.key}: {job.name}",
                folder=str(folder),
                checkpoint_seconds=self.checkpoint_seconds,
                keep_checkpoints=self.keep_checkpoints,
                leases_folder=leases_folder(),
                technique_folders=technique_folders(),
                path=user_path(),
            )
            self._run = runs.start(spec)
        except InvalidSweepError as error:
            ti.xcom_push(OUTCOME_KEY, {**outcome, "status": "failed", "reason": str(error)})
            raise AirflowFailException(str(error)) from None

        job_run: tracking.JobRun | None = None
        for event in self._run.events():
            self._say(event)
            if event["event"] == "waiting":
                continue
            if job_run is None:
                strategy = {key: entry[key] for key in ("technique", "devices", "node")}
                params = hide_secrets(tracking.job_params(job, **strategy))
                job_run = tracking.open_job(uri, parent, job.name, params, sweep.tags(context), folder)
            job_run.follow(event)
            if event["event"] == "end":
                outcome.update(event.get("result") or {})
                outcome.update(status=event["status"], reason=event.get("reason"))
        outcome.update(runs.time_on_devices(folder))
        # What became of the job must not depend on MLflow; its run and model are added when they are known.
        ti.xcom_push(OUTCOME_KEY, finite(outcome))
        if job_run is not None:
            self._finish(ti, job_run, outcome)
            ti.xcom_push(OUTCOME_KEY, finite(outcome))
        if outcome["status"] == "finished":
            return dict(finite(outcome))
        message = f"{job.name} {outcome['status'].replace('_', ' ')}: {outcome['reason']}"
        if outcome["status"] in WORTH_A_RETRY:
            raise AirflowException(message)
        raise AirflowFailException(message)

    def on_kill(self) -> None:
        """Let the ranks write a checkpoint and leave."""
        if self._run is not None:
            self._run.stop()

    def _finish(self, ti: Any, job_run: Any, outcome: dict[str, Any]) -> None:
        job_run.wait(10)
        outcome["run_id"] = job_run.id
        self.mlflow_url = job_run.url
        if outcome.get("model"):
            outcome["model_uri"] = job_run.log_model_folder(outcome["model"])
        job_run.log_metrics({key: outcome.get(key) for key in ("planned_seconds", "actual_seconds")})
        if outcome["status"] in WORTH_A_RETRY and ti.try_number <= (ti.max_tries or 0):
            job_run.leave()
        else:
            job_run.close("finished" if outcome["status"] == "finished" else "failed", outcome["reason"])

    def _say(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "waiting":
            self.log.info("Waiting for devices held by %s", "; ".join(event["for"]))
        elif kind == "leased":
            self.log.info("Holding devices %s of %s", self.entry["device_ids"], self.entry["node"])
        elif kind == "start":
            if event["checkpoint"]:
                self.log.info("Resuming from step %d, checkpoint %s", event["step"], event["checkpoint"])
            self.log.info("Training for %s batches", event["total_batches"] or "an unknown number of")
        elif kind == "step" and event["time"] - self._said_at >= LOG_SECONDS:
            self._said_at = event["time"]
            left = f", {event['eta_seconds']:.0f} s left" if event["eta_seconds"] is not None else ""
            self.log.info(
                "Step %d (epoch %d): loss %.4f, %.1f samples/s%s",
                event["step"],
                event["epoch"],
                event["loss"],
                event["samples_per_second"],
                left,
            )
        elif kind == "checkpoint":
            self.log.info("Checkpoint at step %d, written in %.1f s", event["step"], event["seconds"])
        elif kind == "warning":
            self.log.warning("%s", event["message"])
        elif kind == "eval":
            self.log.info("Epoch %d: eval_loss %.4f", event["epoch"], event["eval_loss"])
        elif kind == "end" and event.get("traceback"):
            self.log.error("%s", event["traceback"])
