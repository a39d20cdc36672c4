"""What training changes that a ``Trainer``'s own checkpoints lack, besides what callbacks remember."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from saturn_airflow.model.jobs import Job
from saturn_airflow.training.job_globals import JobGlobals
from saturn_airflow.training.model_attributes import ModelAttributes
from saturn_airflow.training.optim import own_classes, plain_values
from saturn_airflow.training.optim.own_state import OwnState
from saturn_airflow.training.trainers.trainer_attributes import TrainerAttributes


class StateBesideCheckpoint:
    """Attributes of the trainer, its model and optimizer, buffers that are not persistent, which parameters
    are trained, and global variables and functions of the job's code; made when training begins, after
    callbacks' begin.
    """

    def __init__(self, trainer: Trainer, job: Job, device: torch.device) -> None:
        model: Any = trainer.model
        optimizer: Any = trainer.optimizer
        self._model: nn.Module = model
        self._device = device
        self._trainer = TrainerAttributes(trainer)
        self._attributes = ModelAttributes(model, device)
        self._optimizer = OwnState(getattr(optimizer, "optimizer", optimizer))
        self._globals = JobGlobals(job, model, _functions_of(trainer))
        self._trained = self._are_trained()

    def values(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What has changed, JSON-ready, and why what else has changed can't be kept, by its name.

        :raises JobError: when the trainer or its optimizer has changed what can't be kept.
        """
        attributes, why_not = self._attributes.values()
        variables, others = self._globals.values()
        why_not |= others
        found: dict[str, Any] = {
            "trainer": self._trainer.values(),
            "optimizer": self._optimizer.values(),
            "model": attributes,
            "globals": variables,
            "trained": {n: now for n, now in self._are_trained().items() if self._trained.get(n) != now},
        }
        return {name: part for name, part in found.items() if part}, why_not

    def set(self, values: Mapping[str, Any]) -> None:
        """Continue with what :meth:`values` told."""
        for part in ("trainer", "optimizer", "globals"):
            getattr(self, f"_{part}").set(values.get(part, {}))
        self._attributes.set(values.get("model", {}))
        parameters = dict(self._model.named_parameters())
        for name, trained in values.get("trained", {}).items():
            parameters[name].requires_grad_(trained)
        # Earlier versions kept them apart from other attributes.
        for name, value in values.get("buffers", {}).items():
            prefix, _, key = name.rpartition(".")
            self._model.get_submodule(prefix)._buffers[key] = plain_values.decode(value).to(self._device)

    def _are_trained(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}


def _functions_of(trainer: Trainer) -> dict[str, Any]:
    """What of the job's own a trainer calls, by its name, and its class and those of its callbacks."""
    names = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
    found = {name: getattr(trainer, name) for name in names}
    waiting: list[Any] = [trainer.lr_scheduler]
    for number, scheduler in enumerate(waiting):
        waiting += getattr(scheduler, "_schedulers", ())
        for group, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
            found[f"lr_scheduler[{number}].lr_lambdas[{group}]"] = function
    for part in (trainer, *trainer.callback_handler.callbacks):
        own = (kind for kind in type(part).__mro__ if own_classes.is_own(kind.__module__))
        found |= {kind.__qualname__: kind for kind in own}
    return {name: function for name, function in found.items() if function is not None}
