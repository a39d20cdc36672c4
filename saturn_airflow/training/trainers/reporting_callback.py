"""The callback by which a ``Trainer`` tells Saturn of its steps, saves for it, and ends when asked to."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from saturn_airflow.training.trainers import renamed_weights, whole_checkpoints
from saturn_airflow.training.trainers.trainer_progress import TrainerProgress


class EndTraining(BaseException):
    """Training ends here, with its checkpoint; none of the job's own code is told."""


class ReportingCallback(TrainerCallback):
    """The last of a trainer's callbacks.

    :param found: the checkpoint that training goes on from, and what was said of it.
    """

    def __init__(self, training: TrainerProgress, found: tuple[Path, Mapping[str, Any]] | None) -> None:
        self._training = training
        self._found = found
        self._parts: list[torch.Tensor] = []
        self._since = self._saved_at = time.perf_counter()
        self._saved_step = 0
        self._save = self._end = self._between = False
        #: Whether nobody but Saturn has asked for the save that comes.
        self._unasked = False

    def record_losses(self, trainer: Any) -> None:
        """Record what the trainer's ``training_step`` returns; its sum over a step is the step's loss."""
        take = trainer.training_step

        def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = take(*args, **kwargs)
            self._parts.append(loss.detach())
            return loss

        trainer.training_step = recorded

    def hide_saves(self, trainer: Any) -> None:
        """Have the job's callbacks hear of the saves that it asks for alone: when Saturn saves depends on the
        time that steps take."""
        handler = trainer.callback_handler
        tell = handler.on_save

        def on_save(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            is_best = args.save_strategy == "best" and state.best_global_step == state.global_step
            if is_best or not self._unasked:
                return tell(args, state, control, **kwargs)
            control.should_save = False
            self.on_save(args, state, control, model=handler.model)
            return control

        handler.on_save = on_save

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        training = self._training
        training.begin(state.global_step, state.max_steps, kwargs["train_dataloader"])
        whole_checkpoints.remove_others(Path(args.output_dir), state.best_model_checkpoint)
        if self._found is not None:
            checkpoint, facts = self._found
            # After callbacks that begin anew.
            training.remembered.set(facts["callbacks"])
            training.beside.set(facts.get("beside", {}))
            training.arguments.set(facts.get("changed_arguments", {}))
            training.added.set(facts.get("added", {}))
            training.set_logged(facts.get("logged"))
            training.epoch_losses = list(facts["epoch_losses"])
            training.metrics.update(facts["metrics"])
            training.own_metrics = dict(facts["own_metrics"])
            training.evaluation_seconds = facts["evaluation_seconds"]
            renamed_weights.load(kwargs["model"], checkpoint)
            within = training.epochs.within_epoch
            training.fetches.go_on(facts.get("fetched"), checkpoint, within_epoch=within)
        self._saved_step = state.global_step
        self._since = self._saved_at = time.perf_counter()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        self._training.epochs.begin_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        training, self._unasked = self._training, False
        training.epochs.step_to(state.epoch)
        self._between = False
        loss = float(torch.stack(self._parts).sum())
        self._parts.clear()
        now = time.perf_counter()
        rates = kwargs["optimizer"].param_groups[0]["lr"]
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        epoch = math.ceil(state.epoch) - 1
        training.advance(state.global_step, epoch, loss, float(rates), now - self._since, samples)
        self._since = now
        self._end = self._end or training.enough()
        if training.request.measure is not None:
            # Nothing is kept of a trial but what it compares.
            control.should_evaluate = False
            control.should_save = self._unasked = state.global_step == training.save_at
            self._save = control.should_save and training.epochs.ends(control)
            if self._end and not control.should_save:
                raise EndTraining
            return
        if not training.keeps:
            if self._end and state.global_step < state.max_steps:
                raise EndTraining
            return
        if self._save_due(state.global_step, now) or self._end:
            # After an epoch's last step its evaluation is still to come.
            self._save = training.epochs.ends(control)
            if not self._save:
                self._ask_for_save(control)
        if state.global_step >= state.max_steps:
            self._save = self._end = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        self._training.end_epoch()
        self._between = True
        if self._training.request.measure is not None:
            control.should_evaluate = control.should_save = False
        self._unasked = False
        if self._save:
            self._ask_for_save(control)
        self._save = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        self._training.evaluated(max(0, math.ceil(state.epoch or 0) - 1), kwargs.get("metrics") or {})
        self._since = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        training, path = self._training, Path(args.output_dir) / f"checkpoint-{state.global_step}"
        began = self._since
        self._since = self._saved_at = time.perf_counter()
        if training.epochs.ends(control) and not self._between:
            # To go on from here would leave out the epoch's end, whose checkpoint follows.
            self._save = self._save or control.should_epoch_stop
            return
        if training.would_lack():  # one of the job's own: it has no manifest, and is not gone on from
            args.save_total_limit = None  # or the Trainer would remove the last whole one
            whole_checkpoints.remove_others(path.parent, str(path), state.best_model_checkpoint)
            return
        position = training.epochs.position(state.global_step, control, between=self._between)
        fetched = None if self._between else training.fetches.value()
        known = {"position": position, "fetched": fetched}
        facts = {name: value for name, value in known.items() if value is not None}
        renamed_weights.keep(kwargs["model"], path)
        whole_checkpoints.write_manifest(path, training.facts() | facts)
        self._saved_step = state.global_step
        if training.keeps:
            seconds = time.perf_counter() - began
            training.ranks.emit("checkpoint", step=state.global_step, path=str(path), seconds=seconds)
        self._since = time.perf_counter()
        if self._end and not control.should_training_stop:
            raise EndTraining

    def _ask_for_save(self, control: Any) -> None:
        if not control.should_save:
            control.should_save = self._unasked = self._may_save()

    def _may_save(self) -> bool:
        """Whether a checkpoint would be whole; where it would not, training that is to end does so here.

        Written all the same, it would take the place of one that is.
        """
        training = self._training
        if not training.would_lack():
            return True
        if self._end and training.step < (training.total or 0):
            raise EndTraining
        return False

    def _save_due(self, step: int, now: float) -> bool:
        request = self._training.request
        every, seconds = request.checkpoint_batches, request.checkpoint_seconds
        by_count = every is not None and step - self._saved_step >= every
        return by_count or (seconds is not None and now - self._saved_at >= seconds)
