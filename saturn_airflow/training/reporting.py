"""What a training tells of its steps, and of itself when it ends."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from saturn_airflow.launch.request import NotANumberError
from saturn_airflow.model.status import Status
from saturn_airflow.training import memory, storing, timing
from saturn_airflow.training.base_training import BaseTraining
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.optim.optimizers import learning_rates
from saturn_airflow.training.staging import lie_on_device, own_part, room_for

# Steps by which the time that is left is told.
_RECENT = 50


def step(training: BaseTraining, batch: GlobalBatch, seconds: list[float], warmups: int) -> dict[str, Any]:
    """What the ``step`` event tells of the step on ``batch``.

    :param seconds: of each step in this call, this one the last.
    :param warmups: how many of them tell nothing of the next.
    """
    took, recent = seconds[-1], seconds[max(warmups, len(seconds) - _RECENT) :]
    left = None if training.total is None else training.total - training.step
    return {
        "step": training.step,
        "epoch": batch.position.epoch,
        "loss": training.metrics["loss"],
        "seconds": took,
        "samples_per_second": batch.samples / took,
        "lr": learning_rates(training.optimizer)[0],
        "eta_seconds": None if left is None else left * statistics.median(recent or [took]),
    }


def result(
    training: BaseTraining, seconds: list[float], setup_seconds: float, warmups: int
) -> dict[str, Any]:
    """How the training went, as :func:`saturn_airflow.training.loop.train` returns it.

    :param seconds: of each step in this call.
    """
    measuring = training.request.measure is not None
    evaluating = training.evaluation_seconds
    return {
        "status": Status.FINISHED if training.finished else Status.STOPPED,
        "reason": training.plateau.reason or "",
        "steps": training.step,
        "batches": len(seconds[warmups:] or seconds) if measuring else len(seconds),
        "batches_per_epoch": training.data.batches_per_epoch or 0,
        "total_batches": training.total,
        **training.metrics,
        "metrics": training.own_metrics,
        "seconds": time.perf_counter() - training.started,
        "setup_seconds": setup_seconds,
        **timing.summary(seconds, warmups),
        "busy_cores": training.busy_cores,
        "evaluation_seconds": statistics.fmean(evaluating) if evaluating else 0.0,
        "checkpoint": training.checkpoint,
        "inputs": training.inputs,
        "decided": training.parallel.decided,
        "other_host_bytes": _other_host_bytes(training) if measuring else 0,
    }


def _other_host_bytes(training: BaseTraining) -> int:
    """The most of the host's memory that training takes when its steps are not what takes most."""
    return max(training.bytes_of_loading, _bytes_with_checkpoint(training))


def _bytes_with_checkpoint(training: BaseTraining) -> int:
    """Bytes of the host's memory now, with the copies that checkpoints are written from: no trial has any."""
    ranks = training.ranks
    if ranks.device.type != "cuda":
        return 0
    tensors = storing.apart({**training.state.model_tensors(), **training.state.optimizer_tensors()})
    if ranks.any(not lie_on_device(tensors)):
        return 0
    return memory.host_bytes() + room_for(own_part(tensors, ranks.rank, ranks.everyones))


def check_is_number(training: BaseTraining, loss: float, batch: GlobalBatch) -> None:
    """Check the loss of the step on ``batch``.

    :raises NotANumberError: when it is NaN or infinite, and not beyond the job's end.
    """
    if not math.isfinite(loss) and not training.is_past_end:
        raise NotANumberError(
            f"loss is {loss} at step {training.step + 1} (epoch {batch.position.epoch}); the job stopped "
            "there: lower lr, set clip_grad_norm, or check the data for NaN and for batches without targets"
        )
