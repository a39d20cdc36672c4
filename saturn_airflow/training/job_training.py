"""The training loop: the same for every technique, run by every rank."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from saturn_airflow import library
from saturn_airflow.launch import job_log
from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.launch.users_code import common_to_alike, each_of_the_job
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism import adapting, blocks, unsupported
from saturn_airflow.training import (
    ahead,
    checkpoints,
    given_order,
    loading_weights,
    memory,
    precision,
    reporting,
    resuming,
    state,
    stepping,
    timing,
)
from saturn_airflow.training.base_training import BaseTraining
from saturn_airflow.training.batches import Cut, GlobalBatch, Position
from saturn_airflow.training.code_files import CodeFiles
from saturn_airflow.training.evaluating import Evaluation
from saturn_airflow.training.guarding import spot_checks, whole
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.job_callbacks import Callbacks
from saturn_airflow.training.load_data import load_data
from saturn_airflow.training.loading import check_equal_everywhere, load_model
from saturn_airflow.training.losses import decompose
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.optim import mixing, optimizers
from saturn_airflow.training.optim.broken_optimizers import broken_optimizers
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.own_state import OwnState
from saturn_airflow.training.plateau import Plateau
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.tables import Table

if TYPE_CHECKING:
    from saturn_airflow.training.own_step.validation import OwnEvaluation

# Batches that are slower than those after them, while caches fill.
_WARMUPS = 2


Look = Callable[["Training", nn.Module], object]


def look_nowhere(training: Training, model: nn.Module) -> None:
    """The :data:`Look` of those who have nothing to see."""


def _nothing() -> None:
    pass


class Training(BaseTraining):
    """One job's training on this rank.

    :param look: called with this and the job's model before the technique is.
    """

    def __init__(self, request: TrainRequest, ranks: Ranks, look: Look) -> None:
        self.started = time.perf_counter()
        job_log.set_up(heard=request.measure is None)
        if request.measure is not None:
            memory.leave_headroom(ranks.device)
        self.request, self.ranks = request, ranks
        self.job = job = request.job
        self.hparams = hparams = job.hparams

        technique = library.get(request.technique)
        with common_to_alike():
            model = self._load_model()
            unsupported.refuse_sparse(model, ranks)
            check_equal_everywhere(model, ranks)
            unsupported.refuse_accumulated_batch_norm(model, job)
            self._look_at_model(model)
            self.aliases = state.aliases(model)
            self._load_data()
        loading_weights.start_from(model, job, request.initial_weights)
        self.bytes_of_loading = memory.peak_host_bytes()
        self.code = None if request.measure is not None else CodeFiles()
        look(self, model)
        self._users = UsersState(job, model)  # which looking ahead does not change
        copied = request.measure is None and ranks.is_first and not self._users.holds_model
        bare = whole.without_weights(model) if copied else None
        self._parallelize(technique, model)
        self.cut = Cut(hparams.accumulate, self.parallel.share, self.parallel.shares)
        self.evaluation: Evaluation | OwnEvaluation | None = None
        self._prepare()

        self.step = 0
        self.meanwhile = _nothing
        self.position = Position()
        self.epoch_sum, self.epoch_batches = 0.0, 0
        self.metrics: dict[str, float | None] = {"loss": None, "epoch_loss": None, "eval_loss": None}
        self.own_metrics: dict[str, float] = {}
        assert not isinstance(hparams.early_stopping, Mapping)
        self.plateau = Plateau(hparams.early_stopping)
        self.callbacks = Callbacks(job, ranks)
        self.evaluation_seconds: list[float] = []
        self.inputs: list[dict[str, Any]] = []
        self.last_compared = 0
        self.warned_of: set[str] = set()
        self.checkpoint: str | None = None
        self.checkpoints = resuming.checkpoints(self)
        if self.checkpoints is not None:
            self.samples_known_by = self.data.known_by()
            self._resume(self.checkpoints)
        self._schedule()
        self._look_at_alike()
        can_differ = spot_checks.can_differ(self.parallel, job, request.technique, request.parameters)
        looking = request.measure is None and can_differ
        self.spot_checks = self._make_spot_checks(bare) if looking else None
        self.parallel.settle()
        self.structure = resuming.structure(self)
        self.first_step = self.step
        self.saved_step = self.step if self.checkpoint else -1
        self.tried_step, self.tried_at = self.step, time.perf_counter()

    @contextmanager
    def compared(self, job: Job) -> Iterator[Training]:
        """This training as ``job`` says it, to be compared; only the weights are others afterwards."""
        own = copy.copy(self)
        own.hparams, own.scheduler_step, own.metrics = job.hparams, lambda: None, {}
        own.overlaps, own.meanwhile = False, _nothing
        own.objective = self.objective.exactly()
        own.optimizer = optimizers.make_optimizer(own.hparams, self.groups, self.parallel, self.job)
        own._begin_to_train()
        yield own

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """All of the job's."""
        return [self.optimizer]

    def _look_at_model(self, model: nn.Module) -> None:
        """Look at the whole model, before a technique takes it apart."""
        self.groups = optimizers.parameter_groups(self.hparams, model)

    def _parallelize(self, technique: library.BaseTechnique, model: nn.Module) -> None:
        request, ranks = self.request, self.ranks
        with common_to_alike(), self._users.put_back():
            if self.hparams.compile:
                blocks.compile_blocks(model)
            returned = technique.parallelize(model, ranks, **request.parameters)
            self.parallel = adapting.adapt(returned, model, ranks, request.technique)
            self.objective = Objective(self.job, model, ranks.device).of(self.data)
            if self.parallel.wants_example:
                with self.data.aside():
                    batch = next(self.data.batches(Position(), Cut(self.hparams.accumulate), 1))
                first = batch.micro_batches[0]
                self.parallel.prepare(self.objective, first.data, first.samples)

    def _prepare(self) -> None:
        """Make what trains and evaluates the model, and its state."""
        adapting.refuse_copies(self.parallel, self.request.technique)
        self.optimizer = optimizers.make_optimizer(self.hparams, self.groups, self.parallel, self.job)
        self.frozen = optimizers.frozen(self.parallel.model)
        self._users = UsersState(self.job, self.parallel.model)  # with what the optimizer made
        group_state = GroupState(self.optimizer)
        own_state = OwnState(self.optimizer, mixing.lacks_some(self.groups, self.parallel.trainable()))
        with self._users.put_back():
            self.objective, objective = decompose.objectives(
                self.parallel, self.objective, self.data, self.eval_data, self.job, self.request.technique
            )
        if self.eval_data is not None:
            with common_to_alike(), self._users.put_back():
                self.evaluation = Evaluation(
                    self.job, self.parallel, objective, self.eval_data, self.ranks, self.cut
                )
        kept = resuming.job_globals(self)
        self.state = state.State(self.parallel, self.optimizer, self.aliases, group_state, own_state, kept)
        self._warn_of_untrained_loss()

    def _warn_of_untrained_loss(self) -> None:
        if self.request.measure is None and (names := self.objective.untrained):
            self.warn(
                f"{names[0]!r} and all other parameters of loss_function {self.job.loss_function!r} stay as "
                "they are, since an optimizer gets the model's: call the loss in the model's forward to "
                "train them, or set requires_grad=False to say that they are to stay"
            )

    def _schedule(self) -> None:
        """Make the scheduler, as it is after the steps that are done."""
        self.scheduler_step = resuming.schedule(self)

    def _make_spot_checks(self, bare: nn.Module | None) -> spot_checks.LoopSpotChecks:
        return spot_checks.LoopSpotChecks(self, bare, self.aliases)

    def _look_at_alike(self) -> None:
        """Say which of the jobs that share this trial can't have their optimizer or their schedule."""
        began = time.perf_counter()
        others = self.request.alike
        broken = broken_optimizers(self.job, others, self.groups, self.parallel, self.data)
        for name, reason in broken.items():
            self.ranks.emit("broken", job=name, reason=reason)
        # Training does not take this time.
        self.started += time.perf_counter() - began

    def run(self) -> dict[str, Any]:
        """Train as the request says, and return what :func:`saturn_airflow.training.loop.train` returns."""
        precision.use(self.hparams.precision)
        measure = self.request.measure
        wanted = self.request.batch_count if measure is None else measure.warmups + measure.batches
        self._tell_of_start()
        limit = self._limit(wanted if measure is None else None)
        seconds: list[float] = []
        warmups = measure.warmups if measure is not None else _WARMUPS
        setup_seconds = time.perf_counter() - self.started
        stop = self.finished or limit == 0
        given = self.data.batches(self.position, self.cut, None if measure is not None else limit)
        each = each_of_the_job(f"load_dataloader {self.job.load_dataloader!r}", given)
        # What is fetched by index changes nothing that a checkpoint keeps.
        possible = isinstance(self.data, Table) and ahead.pays(self.job, self.ranks.device)
        upcoming = ahead.Ahead(each, possible, lambda data: self.objective.prepare_ahead(data))
        self._begin_to_train()
        timed_since, worked = math.inf, time.process_time()
        while not stop:
            began = time.perf_counter()
            job_log.at(self.step + 1)
            batch = next(upcoming)
            if self.spot_checks is not None:
                began += self.spot_checks.before(batch, last=self._is_last(batch, limit))
            done = self.step - self.first_step
            save_due = self._save_due(began)
            goes_on = upcoming.possible and not batch.ends_epoch and not self._is_last(batch, limit)
            self.meanwhile = upcoming.fetch if goes_on else _nothing
            stop_asked, save = self._train_step(batch, save_due)
            timing.wait_for(self.ranks.device)  # a GPU still computes when all is asked of it
            seconds.append(time.perf_counter() - began)
            if done < warmups:
                worked = time.process_time()
            else:
                timed_since = min(timed_since, began)
            told = {**reporting.step(self, batch, seconds, warmups), **self._further()}
            self.ranks.emit("step", **told)
            self.inputs = self.inputs or self._inputs(batch)
            if measure is not None:
                enough = self._is_measured(measure, seconds[warmups:], timed_since, worked)
                stop = self.ranks.any(stop_asked or enough)
                continue
            self.callbacks.on_step(told)
            if batch.ends_epoch or self.finished or stop_asked or save:
                self.parallel.complete_steps()
            if batch.ends_epoch or self.finished:
                self._end_epoch(batch.position.epoch)
            reached = wanted is not None and self.step - self.first_step >= wanted
            stop = self.finished or stop_asked or reached
            early = self.plateau.reason is not None or (stop_asked and not reached and not self.finished)
            if early and self.spot_checks is not None:
                self.spot_checks.at_a_stop(batch)
            if stop or save:
                self._save(final=stop)
        self.parallel.complete_steps()
        if measure is None:
            self._save(final=True)
        elif self.evaluation is not None:
            self.evaluation_seconds.append(self.evaluation.seconds())
        return reporting.result(self, seconds, setup_seconds, warmups)

    def _is_measured(self, measure: Measure, seconds: list[float], since: float, worked: float) -> bool:
        """Whether this rank need not train on to be measured; tells how many cores it has kept busy.

        :param seconds: of the batches that are timed.
        :param since: when these began.
        :param worked: CPU seconds of this process before them.
        """
        timed = time.perf_counter() - since
        self.busy_cores = (time.process_time() - worked) / timed if timed > 0 else 0.0
        return timing.is_enough(measure, seconds, timed) or timed >= measure.seconds

    def _load_model(self) -> nn.Module:
        self._tell_of_loading(f"load_model {self.job.load_model!r}")
        model = load_model(self.job)
        if self.request.measure is not None:
            self.ranks.emit("model_loaded", bytes=sum(p.nbytes for p in model.parameters()))
        return model

    def _load_data(self) -> None:
        job, here = self.job, self.request.here
        self._tell_of_loading(f"load_dataloader {job.load_dataloader!r}")
        self.data = load_data(job, job.load_dataloader, self.ranks, here=here)
        self._tell_of_loading("")
        eval_ = job.load_eval_dataloader
        self.eval_data = load_data(job, eval_, in_order=True, here=here) if eval_ else None
        given_order.refuse_shared(self.data, self.eval_data)
        # Whatever the job's code has set: what is compared before the first step is compared exactly.
        precision.use("float32")

    def _tell_of_loading(self, what: str) -> None:
        """Have a trial know which code of the job it waits for; empty for none that loads."""
        if self.request.measure is not None:
            self.ranks.emit("loads", what=what)

    def _tell_of_start(self) -> None:
        known = {"total_batches": self.total, "batches_per_epoch": self.data.batches_per_epoch}
        self.ranks.emit("start", step=self.step, checkpoint=self.checkpoint, **known)

    def _begin_to_train(self) -> None:
        """Have all modules in training mode, but for those that a checkpoint has in another."""
        self.parallel.model.train()
        self.parallel.module.train()
        self.state.attributes.switches.begin()

    def _limit(self, wanted: int | None) -> int | None:
        """How many steps this call takes at the most, of ``wanted``; None where nobody knows."""
        # An iterable may be of another length than it says; its epochs end where they end.
        sure = self.hparams.batches is not None or self.data.is_sure_of_length
        left = self.total - self.step if sure and self.total is not None else None
        return min((count for count in (left, wanted) if count is not None), default=None)

    def _is_last(self, batch: GlobalBatch, limit: int | None) -> bool:
        """Whether the step on ``batch`` is this training's last, of at most ``limit`` in this call."""
        if limit is not None and self.step + 1 - self.first_step >= limit:
            return True
        epochs, position = self.hparams.epochs, batch.position
        if epochs is None or position.epoch + 1 < epochs:
            return False
        # What a stream is asked for, it fetches: the next batch, not before it has to.
        return position.batch + 1 >= (self.data.batches_per_epoch or 0) and batch.ends_epoch

    def _train_step(self, batch: GlobalBatch, save_due: bool) -> tuple[bool, bool]:
        """One optimizer step; whether a rank was asked to stop, and whether a checkpoint is due."""
        with self.spot_checks.around() if self.spot_checks is not None else nullcontext():
            return stepping.take(self, batch, save_due)

    def _further(self) -> dict[str, Any]:
        """What else to report of a step."""
        return {}

    def _inputs(self, batch: GlobalBatch) -> list[dict[str, Any]]:
        """What the model is called with, see :meth:`Objective.describe`."""
        return self.objective.describe(batch.micro_batches[0].data)

    def _end_epoch(self, epoch: int) -> None:
        self.metrics["epoch_loss"] = self.epoch_sum / self.epoch_batches
        self.epoch_sum, self.epoch_batches = 0.0, 0
        self.own_metrics = self._metrics_of_epoch()
        evaluated: dict[str, float] = {}
        if self.evaluation is not None:
            began = time.perf_counter()
            loss, measured = self.evaluation.run()
            self.own_metrics |= measured
            self.metrics["eval_loss"] = evaluated["eval_loss"] = loss
            self.evaluation_seconds.append(time.perf_counter() - began)
        own = {"metrics": self.own_metrics} if self.own_metrics else {}
        if evaluated or own:
            self.ranks.emit("eval", step=self.step, epoch=epoch, **evaluated, **own)
        self.plateau.see(epoch, {**self.metrics, **self.own_metrics})
        told = {name: value for name, value in self.metrics.items() if name != "loss" and value is not None}
        self.callbacks.on_epoch({"step": self.step, "epoch": epoch, **told, "metrics": self.own_metrics})

    def _metrics_of_epoch(self) -> dict[str, float]:
        """What the model measured of the epoch's batches, besides the loss."""
        return {}

    def _save_due(self, now: float) -> bool:
        every, seconds = self.request.checkpoint_batches, self.request.checkpoint_seconds
        by_count = every is not None and self.step + 1 - self.tried_step >= every
        rest = self.checkpoints.rest_seconds if self.checkpoints else 0.0
        by_time = seconds is not None and now - self.tried_at >= max(seconds, rest)
        return by_count or by_time

    def _save(self, *, final: bool) -> None:
        if self.checkpoints is None:
            return
        lacks = resuming.lacking(self) if self.saved_step != self.step else []
        if lacks and not self.finished:
            resuming.warn_of_lacking(self, lacks)
            self.tried_step, self.tried_at = self.step, time.perf_counter()
        elif self.saved_step != self.step:
            step = self.step
            extra = {**resuming.to_dict(self, lacks), **self._own_extra()}

            def saved(path: Path, seconds: float) -> None:
                self.checkpoint = str(path)
                self.ranks.emit("checkpoint", step=step, path=str(path), seconds=seconds)

            try:
                sure, awaited = extra["looked"], self.awaits_copies
                self.checkpoints.save(step, self.state, extra, saved, sure, awaited=awaited)
                self.saved_step = step
                resuming.warn_of_forgotten(self, "is not in the checkpoint", self.checkpoints.forgotten)
            except checkpoints.CheckpointError as error:
                if final:
                    raise
                self.warn(f"{error}; training goes on")
            self.tried_step, self.tried_at = step, time.perf_counter()
        if final:
            self.checkpoints.finish()

    def _resume(self, saved: checkpoints.Checkpoints) -> None:
        with self.data.reading():
            found = saved.load(self.state)
        if found is None:
            return
        path, extra = found
        self.checkpoint = str(path)
        self._set_own_extra(extra)
        resuming.resume(self, saved, extra)

    def _own_extra(self) -> dict[str, Any]:
        """What else a checkpoint is to have, JSON-ready."""
        return {"schedule": self.state.groups.schedule()}

    def _set_own_extra(self, extra: Mapping[str, Any]) -> None:
        """Continue with what :meth:`_own_extra` told."""
        self.scheduled = extra.get("schedule", ())
