"""What a job minimises: from a model and a batch to a sum of losses and what it is a sum over."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from saturn_airflow import references
from saturn_airflow.errors import JobError
from saturn_airflow.jobs import Job
from saturn_airflow.training import precision
from saturn_airflow.training.users_code import of_the_job

IGNORED = -100  # the label that torch's and Hugging Face's losses leave out


class Objective:
    """A job's loss as a (sum, count) pair, so that the shares of a batch add up to the whole."""

    def __init__(self, job: Job, model: nn.Module, device: torch.device) -> None:
        self._loss_function = references.load(str(job.loss_function)) if job.loss_function else None
        self._name = f"loss_function {job.loss_function!r}" if job.loss_function else "the model"
        own_loss = getattr(model, "loss_function", None)
        self._own_loss_is_causal = getattr(own_loss, "__name__", "") == "ForCausalLMLoss"
        self._precision = job.hparams.precision
        self._device = device

    def on(self, device: torch.device) -> Objective:
        """The same objective on another device."""
        other = copy.copy(self)
        other._device = device
        return other

    def prepare(self, batch: Any, samples: int) -> tuple[Any, int]:
        """A batch on the device, and what the mean of its loss is taken over: samples, or its own tokens."""
        if self._loss_function is None and samples and isinstance(batch, Mapping):
            labels = batch.get("labels")
            if isinstance(labels, torch.Tensor) and labels.ndim and not labels.is_floating_point():
                # Hugging Face's losses are means over the labels that are not ignored.
                counted = labels[..., 1:] if self._own_loss_is_causal else labels
                samples = int((counted != IGNORED).sum())
        return precision.place(batch, self._device, self._precision), samples

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the model is called with.

        :raises JobError: when the batch is neither a mapping nor a pair.
        """
        if isinstance(batch, Mapping):
            hide_labels = self._loss_function is not None
            return (), {key: value for key, value in batch.items() if not (hide_labels and key == "labels")}
        if isinstance(batch, list | tuple) and len(batch) == 2:
            return (batch[0],), {}
        raise JobError(
            f"the dataloader gave a {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, list | tuple) else "")
            + " as a batch; give a mapping of the model's arguments, or a pair (inputs, targets)"
        )

    def describe(self, batch: Any) -> list[dict[str, Any]]:
        """What the model is called with, JSON-ready: ``name``, ``dtype`` and ``shape`` of each tensor.

        The name is None where there is none. -1 stands for lengths that may be others: the number of samples,
        and those of integers, such as tokens. Labels are left out.
        """
        args, kwargs = self.inputs(batch)
        return [
            {
                "name": name,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": [-1, *(value.shape[1:] if value.is_floating_point() else [-1] * (value.ndim - 1))],
            }
            for name, value in [*((None, value) for value in args), *kwargs.items()]
            if isinstance(value, torch.Tensor) and value.ndim and name != "labels"
        ]

    def loss(self, outputs: Any, batch: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of a batch's losses and what it is a sum over, as scalars.

        :param count: what :meth:`prepare` counted; with 0 the loss is a 0 that all outputs take part in.
        :raises JobError: when there is no loss, or it is not a scalar.
        """
        if not count:
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            return _nothing(outputs) if torch.is_grad_enabled() else zero, zero
        if self._loss_function is None:
            loss = _own_loss(outputs)
        else:
            with of_the_job(self._name):
                loss = self._loss_function(outputs, batch if isinstance(batch, Mapping) else batch[1])
        if isinstance(loss, list | tuple) and len(loss) == 2:
            total, over = loss
            self._check_scalar(total)
        else:
            self._check_scalar(loss)
            total, over = loss * count, count
        return total, torch.as_tensor(over, dtype=torch.float64, device=self._device).detach()

    def __call__(self, module: nn.Module, batch: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``module`` on a prepared batch; the sum of the losses and what it is a sum over, as scalars."""
        with precision.autocast(self._precision, self._device):
            return self.loss(self.run(module, batch), batch, count)

    def run(self, module: nn.Module, batch: Any) -> Any:
        """Run ``module`` on a prepared batch; its outputs."""
        args, kwargs = self.inputs(batch)
        with precision.autocast(self._precision, self._device):
            return module(*args, **kwargs)

    def _check_scalar(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor):
            raise JobError(
                f"{self._name} returned {type(loss).__name__} as its loss; "
                "return the mean over the samples as a scalar tensor, or a pair (sum, count)"
            )
        if loss.ndim:
            raise JobError(
                f"{self._name} returned a loss of shape {tuple(loss.shape)}, which is no scalar; "
                "return the mean over the samples, or a pair (sum, count)"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise JobError(
                f"{self._name} returned a loss that no trainable parameter takes part in; "
                "compute it from the model's outputs, without detach(), item() or no_grad()"
            )


def _own_loss(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise JobError(
            f"the model returned no loss (but a {type(outputs).__name__}); give the job a loss_function, "
            "or batches with what the model computes its loss from, such as labels"
        )
    return loss


def _nothing(outputs: Any) -> torch.Tensor:
    return torch.stack([tensor.sum() * 0.0 for tensor in _tensors(outputs) if tensor.requires_grad]).sum()


def _tensors(outputs: Any) -> Iterable[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
        return
    if isinstance(outputs, Mapping):
        parts: Iterable[Any] = outputs.values()
    elif isinstance(outputs, list | tuple):
        parts = outputs
    else:
        parts = vars(outputs).values() if hasattr(outputs, "__dict__") else ()
    for part in parts:
        yield from _tensors(part)
