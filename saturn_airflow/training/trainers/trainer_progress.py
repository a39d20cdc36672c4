"""Where a job's ``Trainer`` stands, by what its callback hears of steps, epochs and evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from saturn_airflow.launch import job_log
from saturn_airflow.launch.request import DoesNotFit, NotANumberError, TrainRequest
from saturn_airflow.model import metrics
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import InvalidSweepError, JobError
from saturn_airflow.training import timing
from saturn_airflow.training.code_files import CodeFiles
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.structure import FIRST_STEPS, Structure
from saturn_airflow.training.trainers import seen_state
from saturn_airflow.training.trainers.added_attributes import AddedAttributes
from saturn_airflow.training.trainers.beside_checkpoint import StateBesideCheckpoint
from saturn_airflow.training.trainers.building import batches_per_epoch, build, leave_process_group
from saturn_airflow.training.trainers.callback_state import CallbackState
from saturn_airflow.training.trainers.changed_arguments import ChangedArguments
from saturn_airflow.training.trainers.data_changes import DataChanges
from saturn_airflow.training.trainers.fetch_randomness import FetchRandomness
from saturn_airflow.training.trainers.replaced_parts import ReplacedParts
from saturn_airflow.training.trainers.trained_epochs import TrainedEpochs

#: Batches that are slower than those after them.
_WARMUPS = 2
_EVALUATED = "eval_"
_GOES_ON = "A job that is stopped goes on from an earlier one or begins anew, and comes to the same."
# By which a Trainer knows the mean of the losses that it logs next.
_LOGGING = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")


class TrainerProgress:
    """One job's trainer, on one device, and what is known of its training.

    :param folder: where the trainer writes its checkpoints, and finds one to go on from.
    :param stop_at: the step to end at, which a trial's comparison sets.
    :param save_at: the step to save a checkpoint at in a trial.
    :param look_until: the last step after which a trial looks at what is remembered.
    :raises JobError: when the trainer can't be trained exactly.
    """

    def __init__(
        self,
        request: TrainRequest,
        ranks: Ranks,
        folder: Path,
        stop_at: int | None = None,
        save_at: int | None = None,
        look_until: int = 0,
    ) -> None:
        self.started = time.perf_counter()
        job_log.set_up(heard=request.measure is None)
        self.request, self.ranks, self.folder = request, ranks, folder
        if ranks.size != 1 or request.parameters:
            raise DoesNotFit("a Trainer trains on one device, as it is")
        leave_process_group()
        self.job = request.job
        self.stop_at, self.save_at = stop_at, save_at
        trainer, self._counted = build(self.job, folder)
        self.trainer = trainer
        self.code = CodeFiles()
        self.remembered = CallbackState(trainer.callback_handler.callbacks)
        self.arguments = ChangedArguments(trainer.args)
        self.epochs = TrainedEpochs(trainer)
        self.fetches = FetchRandomness(trainer)
        self.definition = request.definition or Definition.of(self.job).to_dict()
        self.step = self.first_step = 0
        self.total: int | None = None
        self.per_epoch = 0
        self.losses: list[float] = []
        self.epoch_losses: list[float] = []
        self.metrics: dict[str, float | None] = {"loss": None, "epoch_loss": None, "eval_loss": None}
        self.own_metrics: dict[str, float] = {}
        #: The step after which they were measured.
        self._evaluated = -1
        self.seconds: list[float] = []
        self.setup_seconds = 0.0
        self.evaluation_seconds = 0.0
        self.ended = ""
        self.look_until = look_until
        #: What is remembered after each of the first steps.
        self.seen: dict[int, seen_state.Seen] = {}
        #: Of each tensor of the model, its sum after the last of these.
        self.sums: dict[str, float] = {}
        self.warned_of: set[str] = set()
        #: What the job's first steps made of its model; None where an earlier version wrote the checkpoint.
        self.made_first: Mapping[str, str] | None = {}

    @property
    def keeps(self) -> bool:
        """Whether checkpoints and the model are to stay."""
        return self.request.measure is None and bool(self.request.folder)

    @property
    def warmups(self) -> int:
        """Steps that are not timed."""
        return self.request.measure.warmups if self.request.measure is not None else _WARMUPS

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must have besides what the trainer writes, JSON-ready."""
        beside, why_not = self.beside.values()
        if new := {name: why for name, why in why_not.items() if name not in self.warned_of}:
            self.warned_of |= new.keys()
            words = "; ".join(f"{name!r} ({why})" for name, why in new.items())
            self.warn(f"what training changes is not in the checkpoint: {words}. Keep it in a buffer")
        return {
            **({"beside": beside} if beside else {}),
            **({} if self._structure is None else {"made_first": self._structure.made_first}),
            "step": self.step,
            "code": self.code.digests(),
            "definition": self.definition,
            "arguments": self.arguments.given,
            **({"changed_arguments": changed} if (changed := self.arguments.values()) else {}),
            **({"added": added} if (added := self.added.values()) else {}),
            "callbacks": self.remembered.values(),
            "epoch_losses": self.epoch_losses,
            "metrics": self.metrics,
            "own_metrics": self.own_metrics,
            "evaluation_seconds": self.evaluation_seconds,
            "logged": {name: float(getattr(self.trainer, name)) for name in self._logging()},
        }

    def _logging(self) -> list[str]:
        return [name for name in _LOGGING if hasattr(self.trainer, name)]

    def set_logged(self, kept: Mapping[str, float] | None) -> None:
        """Have the trainer's log go on: its ``loss`` is a mean over all steps since it was logged last.

        :param kept: the part ``logged`` of :meth:`facts`; None where an earlier version wrote the checkpoint.
        """
        for name in self._logging():
            if kept is not None and name in kept:
                now, value = getattr(self.trainer, name), kept[name]
                now = now.new_tensor(value) if isinstance(now, torch.Tensor) else type(now)(value)
                setattr(self.trainer, name, now)

    def begin(self, step: int, total: int, loader: Any) -> None:
        """Hear that training begins after ``step``, of ``total``, with the batches of ``loader``."""
        self.step = self.first_step = step
        self.remembered.begin()
        self.beside = StateBesideCheckpoint(self.trainer, self.job, self.ranks.device)
        self.added, self._replaced = AddedAttributes(self.trainer), ReplacedParts(self.trainer)
        self.total, self.per_epoch = total, batches_per_epoch(self.trainer, len(loader))
        self.epochs.begin(step, self.per_epoch, loader)
        within = self.epochs.epoch if self.epochs.within_epoch else None
        self._data = DataChanges(self.trainer, loader, within, self._counted)
        model: Any = self.trainer.model
        known = self.made_first is not None
        self._structure = Structure(self.job, model, self.made_first or {}) if known else None
        self.setup_seconds = time.perf_counter() - self.started
        self.ranks.emit(
            "start", step=step, total_batches=total, batches_per_epoch=self.per_epoch, checkpoint=None
        )

    def would_lack(self) -> bool:
        """Whether a checkpoint would lack what training has changed; then the user is told.

        A trial, which compares what is remembered, refuses what it sees of that.
        """
        if self.request.measure is not None:
            return False
        changed = [*self._data.names(), *self._replaced.names(), *self.added.lacking()]
        if self._structure is not None:
            changed += [*self._structure.changed(), *self._structure.other_parameters()]
        if new := [name for name in changed if f"lacks {name}" not in self.warned_of]:
            self.warned_of |= {f"lacks {name}" for name in new}
            self.warn(
                f"training has changed {', '.join(new[:5])}, which the checkpoints of a Trainer lack: from "
                f"step {self.step} on, none is kept. {_GOES_ON} Data that are told of the epoch, by a method "
                "set_epoch(epoch), can be resumed, and so can modules, hooks, callbacks and an optimizer's "
                "parameters that are there from the first"
            )
        try:
            self.facts()
        except JobError as error:
            changed.append(str(error))
            if str(error) not in self.warned_of:
                self.warned_of.add(str(error))
                self.warn(f"{error}. From step {self.step} on, no checkpoint is kept. {_GOES_ON}")
        return bool(changed)

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
        if self._structure is not None and step <= FIRST_STEPS:
            self._structure.note_first_steps(step)
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
        if step <= self.look_until:
            self.seen[step] = seen_state.of_trainer(self.trainer, self.job)
        if step == self.look_until:
            self.sums = seen_state.sums_of(self.trainer)

    def evaluated(self, epoch: int, found: dict[str, float]) -> None:
        """Hear of an evaluation; there may be several after one step, each of other data."""
        numbers = {
            name.removeprefix(_EVALUATED): float(value)
            for name, value in found.items()
            if name.startswith(_EVALUATED) and isinstance(value, int | float)
        }
        if not numbers:
            return  # of data that the job's code evaluates under another name
        if self.step != self._evaluated:
            self._evaluated, self.own_metrics, self.metrics["eval_loss"] = self.step, {}, None
        self.evaluation_seconds += sum(took for name, took in numbers.items() if name.endswith("runtime"))
        loss = numbers.pop("loss", None)
        if loss is not None:
            self.metrics["eval_loss"] = loss
        found_here = {name: value for name, value in numbers.items() if _is_metric(name)}
        self.own_metrics |= found_here
        if self.request.measure is None and (loss is not None or found_here):
            own = {"metrics": found_here} if found_here else {}
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

    def warn(self, message: str, mixed: bool = False) -> None:
        """Tell the user, as :meth:`BaseTraining.warn` does."""
        self.ranks.emit("warning", message=message, **({"mixed": True} if mixed else {}))


def _is_metric(name: str) -> bool:
    if name.endswith(("runtime", "_per_second", "preparation_time")) or name == "epoch":
        return False
    try:
        metrics.check_name(name, "compute_metrics")
    except InvalidSweepError:
        return False
    return True
