"""How far a job has come in its sweep, from what its runs wrote: readable on any machine, without torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from saturn_airflow.launch import past_runs, runs
from saturn_airflow.launch.runs import Run
from saturn_airflow.model import metrics
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.status import Status

#: The first batches after a launch are slow.
_WARMUPS = 2
#: So many batches show how fast a job is.
_ENOUGH = 3
#: Batches that say how fast it is now; it may have been faster, or slower, before.
_LATELY = 50


@dataclass(frozen=True)
class Speed:
    """How fast a job trained under one strategy.

    :param seconds: of one global batch (median of the last).
    """

    technique: str
    devices: int
    kind: str
    seconds: float


@dataclass(frozen=True)
class Progress:
    """How far a job has come.

    :param steps: optimizer steps done, in the run that came furthest.
    :param total: of all; None where that is not known yet.
    :param per_epoch: global batches in one pass over the data.
    :param status: how the last run ended; None while it is alive, and where there is none.
    :param alive: the run that goes on, if there is one.
    :param training: whether that has its devices.
    :param speeds: by strategy, the last of each.
    :param history: by metric (``eval_loss``, ``epoch_loss``, the job's own), its value by epochs trained.
    :param checkpoint_seconds: the longest that writing one took.
    :param refusals: of strategies it was to be trained under; but for those whose memory ran out, what they
        trained since they were last compared counts for nothing.
    """

    steps: int = 0
    total: int | None = None
    per_epoch: int | None = None
    status: str | None = None
    alive: Run | None = None
    training: bool = False
    speeds: tuple[Speed, ...] = ()
    history: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    checkpoint_seconds: float = 0.0
    refusals: tuple[RefusedStrategy, ...] = ()

    @property
    def share(self) -> float:
        """Of its batches, what has been trained."""
        return 1.0 if self.status == Status.FINISHED else self.steps / self.total if self.total else 0.0


def of(folder: str | Path) -> Progress:
    """The progress of the job whose state is in ``folder`` (:attr:`RunSpec.folder`)."""
    steps, total, per_epoch, status, alive, training, slowest = 0, None, None, None, None, False, 0.0
    speeds: dict[tuple[str, int, str], Speed] = {}
    losses: dict[int, dict[int, float]] = {}
    history: dict[str, dict[float, float]] = {}
    goes_back, every = False, runs.all_of(folder)
    for run in every:
        spec, training = run.spec, False
        if spec.total_batches is not None:  # a loop of the technique's own need not say so
            total, per_epoch = spec.total_batches, spec.batches_per_epoch
        took: list[float] = []
        end, strategy = run.end, (spec.technique, spec.devices)
        for event in run.so_far():
            match event["event"]:
                case "leased":
                    training = True
                    if "technique" in event:
                        now_under = event["technique"], len(event["devices"])
                        took, strategy = (took if now_under == strategy else []), now_under
                case "gave_way":
                    training = False
                case "start":
                    total, per_epoch = event.get("total_batches"), event.get("batches_per_epoch")
                    if goes_back:
                        steps, goes_back = min(steps, event["step"]), False
                        _forget(losses, history, steps, per_epoch)
                case "refused":
                    goes_back = goes_back or event.get("step") is not None
                case "step":
                    steps = max(steps, event["step"])
                    took.append(event["seconds"])
                    losses.setdefault(event["epoch"], {})[event["step"]] = event["loss"]
                case "eval":
                    for metric, value in metrics.of_event(event).items():
                        history.setdefault(metric, {})[event["epoch"] + 1.0] = value
                case "checkpoint":
                    slowest = max(slowest, event["seconds"])
        status, alive = (end["status"], None) if end is not None else (None, run)
        if len(took) >= _WARMUPS + _ENOUGH:
            key = (*strategy, spec.kind)
            speeds[key] = Speed(*key, statistics.median(took[_WARMUPS:][-_LATELY:]))
    whole = {
        epoch + 1.0: statistics.fmean(by_step.values())
        for epoch, by_step in losses.items()
        if per_epoch and len(by_step) == per_epoch
    }
    history["epoch_loss"] = whole
    return Progress(
        steps,
        total,
        per_epoch,
        status,
        alive,
        training and alive is not None,
        tuple(speeds.values()),
        {metric: values for metric, values in history.items() if values},
        slowest,
        tuple(past_runs.refusals_of(every)),
    )


def _forget(
    losses: dict[int, dict[int, float]],
    history: dict[str, dict[float, float]],
    steps: int,
    per_epoch: int | None,
) -> None:
    """Forget what was told of later steps than these."""
    for by_step in losses.values():
        for step in [step for step in by_step if step > steps]:
            del by_step[step]
    for values in history.values():
        for epochs in [epochs for epochs in values if not per_epoch or epochs * per_epoch > steps]:
            del values[epochs]
