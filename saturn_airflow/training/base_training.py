"""A training as the parts of its loop see it: what it is made of, and where it stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

import torch

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import batches
from saturn_airflow.training.batches import Cut, Data, GlobalBatch, Position
from saturn_airflow.training.checkpoints import Checkpoints
from saturn_airflow.training.code_files import CodeFiles
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.plateau import Plateau
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.state import State
from saturn_airflow.training.structure import FIRST_STEPS, Structure


class SpotChecks(Protocol):
    """Compares the technique with one device while it trains; every rank calls its methods together."""

    def before(self, batch: GlobalBatch, *, last: bool) -> float:
        """Check the step on ``batch``, if it is its turn or the ``last``; the seconds that took."""
        ...

    def around(self) -> AbstractContextManager[None]:
        """Around the step that :meth:`before` was asked about."""
        ...

    def at_a_stop(self, batch: GlobalBatch) -> None:
        """Check where training is told to stop, after the step on ``batch``."""
        ...


class BaseTraining:
    """One job's training on this rank."""

    request: TrainRequest
    ranks: Ranks
    job: Job
    hparams: HParams
    #: When it began, by ``time.perf_counter()``.
    started: float
    #: Bytes of the host's memory that this rank took while it loaded the whole model, and the data.
    bytes_of_loading = 0

    data: Data
    cut: Cut
    parallel: Parallel
    objective: Objective
    #: The first names of parameters and buffers.
    aliases: dict[str, str]
    optimizer: torch.optim.Optimizer
    #: What no gradients were asked of when the optimizer was made, by name.
    frozen: Mapping[str, torch.nn.Parameter]
    state: State
    checkpoints: Checkpoints | None
    spot_checks: SpotChecks | None
    plateau: Plateau

    #: Steps done, of all calls; those that were done when this call began.
    step: int
    first_step: int
    #: Steps done that are of no epoch of these data, but of what they were before they changed.
    steps_beside = 0
    position: Position
    epoch_sum: float
    epoch_batches: int
    metrics: dict[str, float | None]
    own_metrics: dict[str, float]
    evaluation_seconds: list[float]
    #: How many cores this rank kept busy while its batches were timed.
    busy_cores = 0.0
    inputs: list[dict[str, Any]]
    #: What the last batch's loss was a mean over.
    counted: float | None = None
    #: The last step of which it was seen that nothing differs from one device.
    last_compared: int
    #: What the user was told that checkpoints lack.
    warned_of: set[str]
    #: The job's own code, where it is trained rather than tried.
    code: CodeFiles | None = None
    #: The path of the last one.
    checkpoint: str | None
    #: By what samples are known before the first step, where checkpoints are written.
    samples_known_by: str | None = None
    #: What the model is made of, where checkpoints are written.
    structure: Structure | None = None
    #: What the job's first steps made of it; None where an earlier version wrote the checkpoint.
    made_first: Mapping[str, str] | None = MappingProxyType({})
    #: What the schedule had written into the optimizer's groups when training stopped.
    scheduled: Sequence[Mapping[str, Any]] = ()
    scheduler_step: Callable[[], None]
    #: Whether nothing but the optimizer changes what it trains, which then awaits copies for checkpoints.
    awaits_copies = True
    #: Whether a step may be completed while the next one is computed.
    overlaps = True
    #: What the host does while the device computes gradients.
    meanwhile: Callable[[], object]

    @property
    def total(self) -> int | None:
        """Steps of the whole job; None where the data has no length."""
        total = batches.total_steps(self.hparams, self.data)
        return None if total is None else total + self.steps_beside

    @property
    def finished(self) -> bool:
        """Whether the job has had all its batches, or has ended early."""
        if self.plateau.reason is not None:
            return True
        if self.hparams.batches is not None:
            return self.step >= self.hparams.batches
        assert self.hparams.epochs is not None
        return self.position.epoch >= self.hparams.epochs

    @property
    def is_past_end(self) -> bool:
        """Whether a trial has gone on after the job's last step: what goes wrong there goes wrong nowhere."""
        return self.total is not None and self.step >= self.total

    def begin_epoch_anew(self, why: str) -> None:
        """Begin the epoch that training stands in from its first batch, when it goes on.

        :raises JobError: when that can't be.
        """
        self.warn(f"{why}, and begins anew", mixed=True)
        self.position = Position(self.position.epoch, 0)
        self.epoch_sum, self.epoch_batches = 0.0, 0

    def advance(self, batch: GlobalBatch, loss: float) -> None:
        """Count the step on ``batch``."""
        self.step += 1
        if self.step <= FIRST_STEPS and self.structure is not None:
            self.structure.note_first_steps(self.step)
        self.metrics["loss"] = loss
        self.epoch_sum += loss
        self.epoch_batches += 1
        epoch, in_epoch = batch.position
        self.position = Position(epoch + 1, 0) if batch.ends_epoch else Position(epoch, in_epoch + 1)

    def warn(self, message: str, mixed: bool = False) -> None:
        """Tell the user.

        :param mixed: whether the job's result may be that of no one code, or data: its sweep says so, too.
        """
        self.ranks.emit("warning", message=message, **({"mixed": True} if mixed else {}))
        if self.ranks.is_first:
            warnings.warn(message, stacklevel=2)
