"""One step of a training: gradients of a batch, and the optimizer's step on them.

The host asks for as much ahead as it can. Who reads the loss waits for the device; where neither the step nor
other ranks depend on it, it is read when the step has been asked for, too.
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


class _News(NamedTuple):
    """What a backward pass told: the loss, what it is a mean over, whether to stop, whether to save, and how
    many gradients are missing."""

    loss: float
    over: float
    stop: bool
    save: bool
    missing: float


def take(training: BaseTraining, batch: GlobalBatch, save_due: bool) -> tuple[bool, bool]:
    """Take the step on ``batch``: whether a rank was asked to stop, and whether a checkpoint is due."""
    parallel, hparams, clips = training.parallel, training.hparams, training.hparams.clip_grad_norm
    if clips is None:
        parallel.step_beside(training.optimizer)
    elif training.overlaps:
        parallel.step_later(training.optimizer)
    # Nothing that the optimizer did shows in the first loss and its gradients.
    with common_to_alike(training.step == 0):
        asked, missing = _backward(training, batch, save_due)
        training.meanwhile()
        known = training.overlaps and training.ranks.size == 1 and training.objective.counts_samples
        news = None if known else _read(training, asked, batch)
        if news is None:
            _complete_gradients(training, batch, batch.samples, missing)
        else:
            _complete_gradients(training, batch, news.over, news.missing)
    if clips is not None:
        parallel.clip_gradients(clips)
    # What it draws is the same on all ranks.
    rng.seed(hparams.seed, "optimizer", training.step)
    try:
        optimizers.take_step(training.optimizer, hparams, parallel)
    except Exception:
        _read(training, asked, batch)  # that the loss is no number says more
        raise
    if training.step == training.first_step:
        training.state.own.values()  # what can't be kept is told at once
    parallel.drop_gradients()
    if not training.is_past_end:
        training.scheduler_step()
    if news is None:
        with common_to_alike(training.step == 0):
            news = _read(training, asked, batch)
        assert news.over == batch.samples
    training.advance(batch, news.loss)
    return news.stop, news.save


def compute_gradients(training: BaseTraining, batch: GlobalBatch) -> float:
    """The loss of ``batch``, of which the gradients are then there.

    :raises NotANumberError: for a loss that is none.
    """
    asked, _ = _backward(training, batch, False)
    news = _read(training, asked, batch)
    _complete_gradients(training, batch, news.over, news.missing)
    return news.loss


def _backward(training: BaseTraining, batch: GlobalBatch, save_due: bool) -> tuple[torch.Tensor, float]:
    """Ask for the gradients of ``batch``: what :func:`_read` reads, and how many are missing on this rank."""
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
    # Loss, what it is a sum over, stop, save, missing gradients, and what the loss's rule wants checked:
    # in one message, so that all ranks act on the same step, and in few operations.
    sums = [functools.reduce(torch.add, parts) for parts in zip(*losses, strict=True)]
    missing = model.missing_gradients()
    flags = [ranks.stop_requested(), save_due and ranks.is_first, missing]
    raised = torch.zeros(len(flags), dtype=torch.float64, device=ranks.device)
    for place, flag in enumerate(flags):
        if flag:
            raised[place] = flag
    asked = torch.cat([torch.stack(sums), raised, objective.end()])
    if ranks.size > 1:
        dist.all_reduce(asked)
    return asked, float(missing)


def _read(training: BaseTraining, asked: torch.Tensor, batch: GlobalBatch) -> _News:
    """Wait for what :func:`_backward` has asked for, and read it.

    :raises NotANumberError: for a loss that is none.
    """
    loss_sum, over_all, stop, save, missing, *tally = asked.tolist()
    rules.check(tally, f"at step {training.step + 1}")
    loss = loss_sum / over_all if over_all else math.nan
    training.counted = over_all
    reporting.check_is_number(training, loss, batch)
    return _News(loss, over_all, stop > 0, save > 0, missing)


def _complete_gradients(training: BaseTraining, batch: GlobalBatch, over: float, missing: float) -> None:
    training.parallel.gradients_missing = missing > 0
    training.parallel.finish_gradients()
    if over != batch.samples:
        training.parallel.scale_gradients(batch.samples / over)
