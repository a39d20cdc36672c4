"""One step of a training: gradients of a batch, and the optimizer's step on them.

The host asks for as much ahead as it can. Who reads the loss waits for the device, so that is done when the
optimizer's step has been asked for, too: what the step needs of the loss stays on the device, and what ranks
agree on goes from host to host.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from saturn_airflow.launch.users_code import common_to_alike
from saturn_airflow.parallelism.changing_buffers import ChangingBuffers
from saturn_airflow.training import reporting, rng
from saturn_airflow.training.base_training import BaseTraining
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.losses import rules
from saturn_airflow.training.optim import optimizers


class _Agreed(NamedTuple):
    """What all ranks know of a backward pass: whether one was asked to stop, whether to save, whether
    gradients are missing, and whether the loss may be a mean over something else than samples."""

    stop: bool
    save: bool
    missing: bool
    otherwise: bool


def take(training: BaseTraining, batch: GlobalBatch, save_due: bool) -> tuple[bool, bool]:
    """Take the step on ``batch``: whether a rank was asked to stop, and whether a checkpoint is due."""
    parallel, hparams, clips = training.parallel, training.hparams, training.hparams.clip_grad_norm
    if clips is None:
        parallel.step_beside(training.optimizer)
    elif training.overlaps:
        parallel.step_later(training.optimizer)
    # Nothing that the optimizer did shows in the first loss and its gradients.
    with common_to_alike(training.step == 0):
        asked, agreed = _backward(training, batch, save_due)
        training.meanwhile()
        loss = None if training.overlaps else _read(training, asked, agreed, batch)
        _complete_gradients(training, batch, asked, agreed)
        optimizers.refuse_thawed(training.frozen)
    if clips is not None:
        parallel.clip_gradients(clips)
    if training.checkpoints is not None:
        training.checkpoints.before_changes()
    # What it draws is the same on all ranks.
    rng.seed(hparams.seed, "optimizer", training.step)
    try:
        optimizers.take_step(training.optimizer, hparams, parallel)
    except Exception:
        _read(training, asked, agreed, batch)  # that the loss is no number says more
        raise
    if training.step == training.first_step:
        training.state.own.values()  # what can't be kept is told at once
    parallel.drop_gradients()
    if not training.is_past_end:
        training.scheduler_step()
    if loss is None:
        with common_to_alike(training.step == 0):
            loss = _read(training, asked, agreed, batch)
    if training.step == training.first_step and agreed.otherwise:
        assert training.counted is not None
        training.objective.warn_of_small_count(training.counted, batch.samples, training.warn)
    training.advance(batch, loss)
    return agreed.stop, agreed.save


def compute_gradients(training: BaseTraining, batch: GlobalBatch) -> float:
    """The loss of ``batch``, of which the gradients are then there.

    :raises NotANumberError: for a loss that is none.
    """
    asked, agreed = _backward(training, batch, False)
    loss = _read(training, asked, agreed, batch)
    _complete_gradients(training, batch, asked, agreed)
    return loss


def _backward(training: BaseTraining, batch: GlobalBatch, save_due: bool) -> tuple[torch.Tensor, _Agreed]:
    """Ask for the gradients of ``batch``: what :func:`_read` reads, and what ranks have agreed on."""
    model, objective, ranks = training.parallel, training.objective, training.ranks
    objective.begin(batch.samples)
    losses: list[tuple[torch.Tensor, torch.Tensor]] = []
    buffers = ChangingBuffers(model, training.job) if training.step == training.first_step else None
    for index, micro_batch in enumerate(batch.micro_batches):
        rng.seed(training.hparams.seed, "step", training.step, index, model.share)
        last = index == len(batch.micro_batches) - 1
        losses.append(
            model.backward(objective, micro_batch.data, micro_batch.samples, 1 / batch.samples, last)
        )
        if buffers is not None:
            buffers.look(last=last)
    # Loss, what it is a sum over, and what the loss's rule wants checked, in few operations.
    sums = [functools.reduce(torch.add, parts) for parts in zip(*losses, strict=True)]
    asked = torch.cat([torch.stack(sums), objective.end()])
    if ranks.size > 1:
        dist.all_reduce(asked)
    # Two flags of one answer: a rank without a loss gives neither.
    known = objective.counts_samples
    stop, save, missing, by_samples, otherwise = ranks.sums(
        [
            ranks.stop_requested(),
            save_due and ranks.is_first,
            model.missing_gradients(),
            known is True,
            known is False,
        ]
    )
    return asked, _Agreed(stop > 0, save > 0, missing > 0, otherwise > 0 or not by_samples)


def _read(training: BaseTraining, asked: torch.Tensor, agreed: _Agreed, batch: GlobalBatch) -> float:
    """Wait for the loss of ``batch`` that :func:`_backward` has asked for.

    :raises NotANumberError: for a loss that is none.
    """
    loss_sum, over_all, *tally = asked.tolist()
    rules.check(tally, f"at step {training.step + 1}")
    loss = loss_sum / over_all if over_all else math.nan
    assert agreed.otherwise or over_all == batch.samples
    training.counted = over_all
    reporting.check_is_number(training, loss, batch)
    return loss


def _complete_gradients(
    training: BaseTraining, batch: GlobalBatch, asked: torch.Tensor, agreed: _Agreed
) -> None:
    training.parallel.gradients_missing = agreed.missing
    training.parallel.finish_gradients()
    if agreed.otherwise:
        # They were divided by the samples, before it was known what the loss is a sum over.
        training.parallel.scale_gradients(batch.samples / asked[1])
