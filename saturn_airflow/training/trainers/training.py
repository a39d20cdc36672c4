"""Training a job's ``Trainer``: its own loop runs, and Saturn is told of each step by a callback."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.status import Status
from saturn_airflow.training import timing
from saturn_airflow.training.exports import export_trained
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.trainers import whole_checkpoints
from saturn_airflow.training.trainers.building import rng_unchanged
from saturn_airflow.training.trainers.reporting_callback import EndTraining, ReportingCallback
from saturn_airflow.training.trainers.trainer_progress import TrainerProgress


class TrainerTraining(TrainerProgress):
    """One job's training by its trainer, on one device."""

    def run(self) -> dict[str, Any]:
        """Train, from the last checkpoint if there is one; what :func:`..loop.train` returns."""
        trainer: Any = self.trainer
        found = whole_checkpoints.newest(self.folder, self.warn)
        if self.request.measure is not None:
            trainer.args.eval_on_start = False
        if found is not None:
            self._go_on(*found)
        callback = ReportingCallback(self, found)
        trainer.add_callback(callback)
        callback.record_losses(trainer)
        callback.hide_saves(trainer)
        status = Status.FINISHED
        try:
            with of_the_job("Trainer.train()"):
                trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
        except EndTraining:
            status = Status.STOPPED
        if self.request.measure is not None and self.stop_at is None:
            self._measure_evaluation()
        elif self.request.measure is None and status == Status.FINISHED:
            if self.total is not None and self.step < self.total:
                self.ended = "a callback of the Trainer's ended it"
            if self.keeps:
                export_trained(trainer.model, self.job, self.folder.parent / "model")
        return self._result(status)

    def _go_on(self, path: Path, facts: dict[str, Any]) -> None:
        self.trainer.args.eval_on_start = False
        before, now = Definition.from_dict(facts["definition"]), Definition.from_dict(self.definition)
        changes = [*map(str, before.changes(now))] if self.request.goes_on_from is None else []
        changes += whole_checkpoints.changes(facts["arguments"], self.arguments.given)
        if changes:
            raise JobError(
                f"{path} belongs to another training ({'; '.join(changes[:5])}): start the job from scratch "
                "(saturn restart), or undo the change"
            )
        if why := self.code.why_mixed(facts.get("code", {}), path):
            self.warn(why, mixed=True)
        self.made_first = facts.get("made_first")
        if (position := facts.get("position")) is not None:
            self.epochs.go_on(position, only_more=self.request.goes_on_from is not None)

    def _measure_evaluation(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        steps: Any = args.eval_steps
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        if strategy == "no" or trainer.eval_dataset is None:
            return
        began = time.perf_counter()
        with rng_unchanged(), of_the_job("Trainer.evaluate()"):
            trainer.evaluate()
        times = args.num_train_epochs
        if strategy == "steps" and self.total:
            times = self.total / (steps if steps >= 1 else steps * self.total)
        self.evaluation_seconds = (time.perf_counter() - began) * math.ceil(times)

    def _result(self, status: str) -> dict[str, Any]:
        measuring = self.request.measure is not None
        counted = self.seconds[self.warmups :] or self.seconds
        return {
            "status": status,
            "reason": self.ended,
            "steps": self.step,
            "batches": len(counted) if measuring else len(self.seconds),
            # A plan counts epochs by the job's hyper-parameters, which know of one: the whole training.
            "batches_per_epoch": self.total or 0,
            "total_batches": self.total,
            **self.metrics,
            "metrics": self.own_metrics,
            "seconds": time.perf_counter() - self.started,
            "setup_seconds": self.setup_seconds,
            **timing.summary(self.seconds, self.warmups),
            "evaluation_seconds": self.evaluation_seconds,
            "checkpoint": None,
            "inputs": [],
            "decided": {},
        }


def train(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Train as :func:`saturn_airflow.training.loop.train` does."""
    if request.folder:
        return TrainerTraining(request, ranks, request.checkpoints).run()
    with tempfile.TemporaryDirectory(prefix="saturn-trainer-") as folder:
        return TrainerTraining(request, ranks, Path(folder)).run()
