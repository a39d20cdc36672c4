"""One job's training as an Airflow task on its node."""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from saturn_airflow.cluster import Node
from saturn_airflow.jobs import Job
from saturn_airflow.operators.context import (
    MLFLOW_URL_KEY,
    SweepContext,
    leases_folder,
    mlflow_uri,
    technique_folders,
    user_path,
)

OUTCOME_KEY = "outcome"
#: What a further try can mend; the job's own errors are not among them.
WORTH_A_RETRY = ("stopped", "lost", "hung", "failed")


class TrainOperator(BaseOperator):
    """Train one job of a plan on the devices the plan gave it.

    A retried task goes on from the job's last checkpoint. Pushes ``outcome``: how it ended, with the last
    losses, the seconds it took, and where the model is.
    """

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
        self._run: Any = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Train.

        :raises AirflowFailException: when the job's own code raises or its loss is not a number.
        :raises AirflowException: when training ended otherwise than by finishing; a retry resumes it.
        """
        from saturn_airflow.training import runs

        ti = context["ti"]
        sweep = SweepContext.of(context, self.group)
        entry, node = self.entry, Node(**self.node)
        job = Job.from_dict(entry["job"])
        spec = runs.RunSpec(
            mode="train",
            job=job,
            technique=entry["technique"],
            parameters=entry["parameters"],
            node=node.name,
            kind=node.kind,
            slots=node.devices,
            device_ids=tuple(entry["device_ids"]),
            priority=(entry["priority"][0], entry["priority"][1]),
            holder=f"{sweep.key}: {job.name}",
            folder=str(sweep.job_folder(job.name)),
            checkpoint_seconds=self.checkpoint_seconds,
            keep_checkpoints=self.keep_checkpoints,
            leases_folder=leases_folder(),
            technique_folders=technique_folders(),
            path=user_path(),
        )
        outcome: dict[str, Any] = {
            "job": job.name,
            "technique": entry["technique"],
            "devices": entry["devices"],
            "node": node.name,
            "device_ids": entry["device_ids"],
            "planned_seconds": entry["end"] - entry["start"],
            "status": "lost",
            "reason": "the task was ended",
        }
        job_run = None
        self._run = runs.start(spec)
        for event in self._run.events():
            self._say(event)
            if event["event"] == "waiting":
                continue
            if job_run is None:
                job_run = self._open_job(context, sweep, job)
            if event["event"] == "leased":
                outcome["started_at"] = event.get("time", time.time())
            elif event["event"] == "end":
                outcome.update(status=event["status"], reason=event.get("reason"), ended_at=time.time())
                outcome.update(event.get("result") or {})
            job_run.follow(event)
        if job_run is not None:
            outcome["run_id"] = job_run.id
            if outcome["status"] == "finished" and outcome.get("checkpoint"):
                outcome["model_uri"] = job_run.log_model_folder(outcome["checkpoint"])
            final = outcome["status"] not in WORTH_A_RETRY or ti.try_number > (ti.max_tries or 0)
            if final:
                job_run.close(outcome["status"], outcome.get("reason"))
        ti.xcom_push(OUTCOME_KEY, outcome)
        if outcome["status"] == "finished":
            return outcome
        message = f"{job.name} {outcome['status'].replace('_', ' ')}: {outcome['reason']}"
        if outcome["status"] in WORTH_A_RETRY:
            raise AirflowException(message)
        raise AirflowFailException(message)

    def on_kill(self) -> None:
        """Let the ranks write a checkpoint and leave."""
        if self._run is not None:
            self._run.stop()

    def _open_job(self, context: Context, sweep: SweepContext, job: Job) -> Any:
        from saturn_airflow import tracking

        ti = context["ti"]
        parent = ti.xcom_pull(task_ids=self.trials_task, key="sweep", map_indexes=-1)
        hparams = {"lr": job.hparams.lr, "batch_size": job.hparams.batch_size, "epochs": job.hparams.epochs}
        job_run = tracking.open_job(
            mlflow_uri(),
            parent["run_id"],
            f"{sweep.key}/{job.name}",
            job.name,
            {
                **hparams,
                **job.model_args,
                "technique": self.entry["technique"],
                "devices": self.entry["devices"],
                "node": self.entry["node"],
            },
            sweep.tags(context),
        )
        if job_run.url:
            ti.xcom_push(MLFLOW_URL_KEY, job_run.url)
        return job_run

    def _say(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "waiting":
            self.log.info("Waiting for devices held by %s", "; ".join(event["for"]))
        elif kind == "leased":
            self.log.info("Holding devices %s of %s", self.entry["device_ids"], self.entry["node"])
        elif kind == "start":
            resumed = f", resumed from step {event['resumed_from']}" if event.get("resumed_from") else ""
            self.log.info("Training for %s batches%s", event.get("batches"), resumed)
        elif kind == "checkpoint":
            self.log.info("Checkpoint at step %s", event.get("step"))
        elif kind == "warning":
            self.log.warning("%s", event["message"])
        elif kind == "eval":
            self.log.info("Epoch %s: eval_loss %.4f", event.get("epoch"), event["eval_loss"])
        elif kind == "end" and event.get("traceback"):
            self.log.error("%s", event["traceback"])
