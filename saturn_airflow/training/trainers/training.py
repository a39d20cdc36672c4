"""Training a job's ``Trainer``: its own loop runs, and Saturn is told of each step by a callback."""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

from saturn_airflow.launch import job_log
from saturn_airflow.launch.request import DoesNotFit, NotANumberError, TrainRequest
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import metrics
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import InvalidSweepError, JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import timing
from saturn_airflow.training.exports import export_trained
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.trainers import kept
from saturn_airflow.training.trainers.building import (
    arguments,
    batches_per_epoch,
    be_alone,
    build,
    rng_unchanged,
)
from saturn_airflow.training.trainers.callbacks import Remembered
from saturn_airflow.training.trainers.telling import Ended, Telling

#: Batches that are slower than those after them.
_WARMUPS = 2
_EVALUATED = "eval_"


class TrainerTraining:
    """One job's training by its trainer, on one device.

    :param folder: where the trainer writes its checkpoints, and finds one to go on from.
    :param stop_at: the step to end at, which a trial's comparison sets.
    :param save_at: the step to save a checkpoint at in a trial.
    :raises JobError: when the trainer can't be trained exactly.
    """

    def __init__(
        self,
        request: TrainRequest,
        ranks: Ranks,
        folder: Path,
        stop_at: int | None = None,
        save_at: int | None = None,
    ) -> None:
        self.started = time.perf_counter()
        job_log.set_up(heard=request.measure is None)
        self.request, self.ranks, self.folder = request, ranks, folder
        if ranks.size != 1 or request.parameters:
            raise DoesNotFit("a Trainer trains on one device, as it is")
        be_alone()
        self.job = Job.from_dict(request.job)
        self.stop_at, self.save_at = stop_at, save_at
        self.trainer = trainer = build(self.job, folder)
        self.remembered = Remembered(trainer.callback_handler.callbacks)
        self.definition = request.definition or Definition.of(self.job).to_dict()
        self.step = self.first_step = 0
        self.total: int | None = None
        self.per_epoch = 0
        self.losses: list[float] = []
        self.epoch_losses: list[float] = []
        self.metrics: dict[str, float | None] = {"loss": None, "epoch_loss": None, "eval_loss": None}
        self.own_metrics: dict[str, float] = {}
        self.seconds: list[float] = []
        self.setup_seconds = 0.0
        self.evaluation_seconds = 0.0
        self.ended = ""

    @property
    def keeps(self) -> bool:
        """Whether checkpoints and the model are to stay."""
        return self.request.measure is None and bool(self.request.folder)

    @property
    def warmups(self) -> int:
        """Steps that are not timed."""
        return self.request.measure.warmups if self.request.measure is not None else _WARMUPS

    def run(self) -> dict[str, Any]:
        """Train, from the last checkpoint if there is one; what :func:`..loop.train` returns."""
        trainer: Any = self.trainer
        found = kept.newest(self.folder, self.warn)
        if self.request.measure is not None:
            trainer.args.eval_on_start = False
        if found is not None:
            self._go_on(*found)
        telling = Telling(self, None if found is None else found[1])
        trainer.add_callback(telling)
        telling.hear_losses(trainer)
        status = "finished"
        try:
            with of_the_job("Trainer.train()"):
                trainer.train(resume_from_checkpoint=None if found is None else str(found[0]))
        except Ended:
            status = "stopped"
        if self.request.measure is not None and self.stop_at is None:
            self._measure_evaluation()
        elif self.request.measure is None and status == "finished":
            if self.total is not None and self.step < self.total:
                self.ended = "a callback of the Trainer's ended it"
            if self.keeps:
                export_trained(trainer.model, self.job, self.folder.parent / "model")
        return self._result(status)

    def _go_on(self, path: Path, facts: dict[str, Any]) -> None:
        self.trainer.args.eval_on_start = False
        before, now = Definition.from_dict(facts["definition"]), Definition.from_dict(self.definition)
        changes = [*map(str, before.changes(now))] if self.request.goes_on_from is None else []
        changes += kept.changes(facts["arguments"], arguments(self.trainer))
        if changes:
            raise JobError(
                f"{path} belongs to another training ({'; '.join(changes[:5])}): start the job from scratch "
                "(saturn restart), or undo the change"
            )

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must have besides what the trainer writes, JSON-ready."""
        return {
            "step": self.step,
            "definition": self.definition,
            "arguments": arguments(self.trainer),
            "callbacks": self.remembered.values(),
            "epoch_losses": self.epoch_losses,
            "metrics": self.metrics,
            "own_metrics": self.own_metrics,
            "evaluation_seconds": self.evaluation_seconds,
        }

    def begin(self, step: int, total: int, batches: int) -> None:
        """Hear that training begins after ``step``, of ``total``, with so many batches in an epoch."""
        self.step = self.first_step = step
        self.total, self.per_epoch = total, batches_per_epoch(self.trainer, batches)
        self.setup_seconds = time.perf_counter() - self.started
        self.ranks.emit(
            "start", step=step, total_batches=total, batches_per_epoch=self.per_epoch, checkpoint=None
        )

    def advance(
        self, step: int, epoch: int, loss: float, lr: float | None, took: float, samples: int
    ) -> None:
        """Hear of a step.

        :raises NotANumberError: when its loss is none.
        """
        self.step, self.metrics["loss"] = step, loss
        if not math.isfinite(loss):
            raise NotANumberError(
                f"loss is {loss} at step {step} (epoch {epoch}); the job stopped there: lower learning_rate, "
                "set max_grad_norm, or check the data"
            )
        self.losses.append(loss)
        self.epoch_losses.append(loss)
        self.seconds.append(took)
        steady = self.seconds[self.warmups :] or self.seconds
        left = None if self.total is None else (self.total - step) * sum(steady) / len(steady)
        self.ranks.emit(
            "step",
            step=step,
            epoch=epoch,
            loss=loss,
            lr=lr,
            seconds=took,
            samples_per_second=samples / took if took else None,
            eta_seconds=left,
        )
        job_log.at(step + 1)

    def evaluated(self, epoch: int, found: dict[str, float]) -> None:
        """Hear of an evaluation."""
        numbers = {
            name.removeprefix(_EVALUATED): float(value)
            for name, value in found.items()
            if name.startswith(_EVALUATED) and isinstance(value, int | float)
        }
        self.evaluation_seconds += numbers.get("runtime", 0.0)
        loss = numbers.pop("loss", None)
        self.metrics["eval_loss"] = loss
        self.own_metrics = {name: value for name, value in numbers.items() if _is_metric(name)}
        if self.request.measure is None and (loss is not None or self.own_metrics):
            own = {"metrics": self.own_metrics} if self.own_metrics else {}
            self.ranks.emit("eval", step=self.step, epoch=epoch, eval_loss=loss, **own)

    def end_epoch(self) -> None:
        """Hear that the batches of an epoch are done."""
        if self.epoch_losses:
            self.metrics["epoch_loss"] = sum(self.epoch_losses) / len(self.epoch_losses)
        self.epoch_losses = []

    def enough(self) -> bool:
        """Whether training is to end after this step, which is then in a checkpoint."""
        asked = self.ranks.stop_requested()
        done, measure, wanted = self.step - self.first_step, self.request.measure, self.request.batch_count
        if self.stop_at is not None:
            return asked or self.step >= self.stop_at
        if measure is None:
            return asked or (wanted is not None and done >= wanted)
        timed = self.seconds[measure.warmups :]
        return asked or timing.is_enough(measure, timed, sum(timed)) or sum(timed) >= measure.seconds

    def warn(self, message: str) -> None:
        """Tell the user."""
        self.ranks.emit("warning", message=message)

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


def _is_metric(name: str) -> bool:
    if name.endswith(("runtime", "_per_second", "preparation_time")) or name == "epoch":
        return False
    try:
        metrics.check_name(name, "compute_metrics")
    except InvalidSweepError:
        return False
    return True
