"""Where a training stands, as a checkpoint keeps it besides tensors and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saturn_airflow.training.batches import Position

if TYPE_CHECKING:
    from saturn_airflow.training.loop import Training


def stand(training: Training) -> dict[str, Any]:
    """Where ``training`` stands, JSON-ready."""
    return {
        "seed": training.hparams.seed,
        "step": training.step,
        "epoch": training.position.epoch,
        "batch": training.position.batch,
        "epoch_sum": training.epoch_sum,
        "epoch_batches": training.epoch_batches,
        "metrics": training.metrics,
        "own_metrics": training.own_metrics,
        "lr": [float(group["lr"]) for group in training.optimizer.param_groups],
        "plateau": training.plateau.to_dict(),
        "technique": training.request.technique,
        "devices": training.ranks.size,
        "looked": training.step if training.looks is None else training.looked,
    }


def go_on(training: Training, extra: Mapping[str, Any]) -> None:
    """Have ``training`` go on from where it stood."""
    training.step = extra["step"]
    training.position = Position(extra["epoch"], extra["batch"])
    training.epoch_sum, training.epoch_batches = extra["epoch_sum"], extra["epoch_batches"]
    # Before anybody looked again, the trial's comparison was all there was.
    training.looked = extra.get("looked", training.step)
    training.metrics.update(extra["metrics"])
    training.own_metrics = extra.get("own_metrics", {})
    if "plateau" in extra:
        training.plateau.go_on(extra["plateau"])
    before = (extra["technique"], extra["devices"])
    now = (training.request.technique, training.ranks.size)
    if training.looked < training.step and before != now:
        training.warn(
            f"{before[0]} x {before[1]} trained up to step {training.step}, and was last compared with one "
            f"device at step {training.looked}; {now[0]} x {now[1]} goes on from there"
        )
