"""The training loop: the same for every technique, run by every rank."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow import library
from saturn_airflow.launch import job_log
from saturn_airflow.launch.request import Measure, NotANumberError, TrainRequest
from saturn_airflow.launch.users_code import common_to_alike, each_of_the_job
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism import adapting, blocks, unsupported
from saturn_airflow.parallelism.changing_buffers import ChangingBuffers
from saturn_airflow.training import batches, checkpoints, initial_weights, precision, rng, state
from saturn_airflow.training.batches import Cut, GlobalBatch, Position
from saturn_airflow.training.evaluating import Evaluation
from saturn_airflow.training.guarding import looks, whole
from saturn_airflow.training.loading import check_equal_everywhere, load_model
from saturn_airflow.training.losses import decompose, rules
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.optim.alike import broken_optimizers
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.own_state import OwnState
from saturn_airflow.training.ranks import Ranks

# Batches that are slower than those after them, while caches fill.
_WARMUPS = 2
# The standard error at which a mean is precise, as a share of it.
_PRECISION = 0.02


def train(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Train one job, from its last checkpoint if there is one; every rank calls this together.

    Rank 0 emits these events: ``start`` (step, total_batches, batches_per_epoch, checkpoint), ``step`` (step,
    epoch, loss, seconds, samples_per_second, lr, eta_seconds), ``eval`` (step, epoch, eval_loss, and
    ``metrics`` where the job has its own), ``checkpoint`` (step, path, seconds), ``looked`` (step, seconds,
    checked) and ``warning`` (message). Steps count from 1, epochs from 0; totals are None where the data has
    no length.

    :returns: ``status`` (``"finished"`` or ``"stopped"``), ``steps`` (done in all), ``batches`` (done in this
        call), ``batches_per_epoch`` (0 where the data has no length), ``total_batches``, ``loss`` (of the
        last batch), ``epoch_loss`` (mean over the last epoch), ``eval_loss``, ``metrics`` (the job's own, by
        name), ``seconds`` (of this call), ``setup_seconds`` (until the first batch), ``warmup_seconds`` (what
        the first batches took longer than the others), ``seconds_per_batch`` (mean after the first two) and
        ``spread`` (interquartile range over the median), ``evaluation_seconds`` (of one pass), ``checkpoint``
        (path), ``decided`` (parameters of the technique that were left to it). Measuring, ``batches`` are
        those that were timed.
    :raises DoesNotFit: when the technique can't train this job on these devices.
    :raises ChangesResultError: when it trains otherwise than one device by now.
    :raises NotANumberError: when the loss is NaN or infinite.
    :raises JobError: when the job can't be trained as it is written.
    """
    return Training(request, ranks).run()


class Training:
    """One job's training on this rank.

    :param look: called with this and the job's model before the technique is.
    """

    def __init__(
        self,
        request: TrainRequest,
        ranks: Ranks,
        look: Callable[[Training, nn.Module], object] = lambda training, model: None,
    ) -> None:
        self.started = time.perf_counter()
        job_log.set_up(heard=request.measure is None)
        self.request = request
        self.ranks = ranks
        self.job = job = Job.from_dict(request.job)
        self.hparams = hparams = job.hparams

        technique = library.get(request.technique)
        with common_to_alike():
            model = load_model(job)
            check_equal_everywhere(model, ranks)
            unsupported.refuse_accumulated_batch_norm(model, hparams.accumulate)
            self.groups = groups = optimizers.parameter_groups(hparams, model)
            aliases = state.aliases(model)
            here = request.here
            self.data = batches.load(job, job.load_dataloader, here=here)
            evaluation = job.load_eval_dataloader
            eval_data = batches.load(job, evaluation, in_order=True, here=here) if evaluation else None
        self.eval_data = eval_data
        initial_weights.start_from(model, job, request.initial_weights)
        look(self, model)
        bare = whole.bare(model) if request.measure is None and ranks.is_first else None
        with common_to_alike():
            if hparams.compile:
                blocks.compile_blocks(model)
            returned = technique.parallelize(model, ranks, **request.parameters)
            self.parallel = adapting.adapt(returned, model, ranks, request.technique)
            self.objective = Objective(job, model, ranks.device).of(self.data)
            if self.parallel.wants_example:
                first = next(self.data.batches(Position(), Cut(hparams.accumulate), 1)).micro_batches[0]
                self.parallel.prepare(self.objective, first.data, first.samples)
        self.optimizer = optimizers.make_optimizer(hparams, groups, self.parallel)
        group_state = GroupState(self.optimizer)
        self.own_state = OwnState(self.optimizer)
        self.cut = Cut(hparams.accumulate, self.parallel.share, self.parallel.shares)
        self.objective, objective = decompose.objectives(
            self.parallel, self.objective, self.data, eval_data, job, request.technique
        )
        self.evaluation: Evaluation | None = None
        if eval_data is not None:
            with common_to_alike():
                self.evaluation = Evaluation(job, self.parallel, objective, eval_data, ranks, self.cut)

        self.step = 0
        self.position = Position()
        self.epoch_sum, self.epoch_batches = 0.0, 0
        self.metrics: dict[str, float | None] = {"loss": None, "epoch_loss": None, "eval_loss": None}
        self.own_metrics: dict[str, float] = {}
        self.evaluation_seconds: list[float] = []
        self.inputs: list[dict[str, Any]] = []
        #: The last step of which it was seen that nothing differs from one device.
        self.looked = 0
        self.checkpoint: str | None = None
        self.checkpoints: checkpoints.Checkpoints | None = None
        if request.measure is None and request.folder:
            self.state = state.State(self.parallel, self.optimizer, aliases, group_state, self.own_state)
            self.checkpoints = checkpoints.Checkpoints(
                request.checkpoints,
                ranks,
                request.keep_checkpoints,
                self.warn,
                definition=Definition.from_dict(request.definition or Definition.of(job).to_dict()),
                goes_on_from=request.goes_on_from,
            )
            self._resume(self.checkpoints)
        self.scheduler_step = optimizers.make_scheduler(hparams, self.optimizer, self.step, group_state)
        self._look_at_alike(groups)
        self.looks: looks.Looks | None = None
        can_differ = looks.can_differ(self.parallel, job, request.technique, request.parameters)
        if request.measure is None and can_differ:
            self.looks = looks.Looks(self, bare, aliases)
        self.first_step = self.step
        self.saved_step = self.step if self.checkpoint else -1
        self.tried_step, self.tried_at = self.step, time.perf_counter()

    @property
    def total(self) -> int | None:
        """Steps of the whole job; None where the data has no length."""
        if self.hparams.batches is not None:
            return self.hparams.batches
        assert self.hparams.epochs is not None
        per_epoch = self.data.batches_per_epoch
        return self.hparams.epochs * per_epoch if per_epoch is not None else None

    @property
    def finished(self) -> bool:
        """Whether the job has had all its batches."""
        if self.hparams.batches is not None:
            return self.step >= self.hparams.batches
        assert self.hparams.epochs is not None
        return self.position.epoch >= self.hparams.epochs

    @property
    def beyond(self) -> bool:
        """Whether a trial has gone on after the job's last step: what goes wrong there goes wrong nowhere."""
        return self.total is not None and self.step >= self.total

    def _look_at_alike(self, groups: optimizers.Groups) -> None:
        """Say which of the jobs that share this trial can't have their optimizer or their schedule."""
        began = time.perf_counter()
        others = map(Job.from_dict, self.request.alike)
        for name, reason in broken_optimizers(self.job, others, groups, self.parallel).items():
            self.ranks.emit("broken", job=name, reason=reason)
        # Training does not take this time.
        self.started += time.perf_counter() - began

    def run(self) -> dict[str, Any]:
        precision.use(self.hparams.precision)
        measure = self.request.measure
        wanted = self.request.batch_count if measure is None else measure.warmups + measure.batches
        self.ranks.emit(
            "start",
            step=self.step,
            total_batches=self.total,
            batches_per_epoch=self.data.batches_per_epoch,
            checkpoint=self.checkpoint,
        )
        limit = None if self.total is None else self.total - self.step
        if measure is None and wanted is not None:
            limit = wanted if limit is None else min(limit, wanted)
        seconds: list[float] = []
        warmups = measure.warmups if measure is not None else _WARMUPS
        setup_seconds = time.perf_counter() - self.started
        stop = self.finished or limit == 0
        given = self.data.batches(self.position, self.cut, None if measure is not None else limit)
        upcoming = each_of_the_job(f"load_dataloader {self.job.load_dataloader!r}", given)
        self.parallel.model.train()
        self.parallel.module.train()
        timed_since = math.inf
        while not stop:
            began = time.perf_counter()
            job_log.at(self.step + 1)
            batch = next(upcoming)
            if self.looks is not None:
                began += self.looks.before(batch, last=self._is_last(batch, limit))
            done = self.step - self.first_step
            save_due = self._save_due(began)
            stop_asked, save = self._train_step(batch, save_due)
            _wait_for(self.ranks.device)
            took = time.perf_counter() - began
            seconds.append(took)
            if done >= warmups:
                timed_since = min(timed_since, began)
            self._report_step(batch, took, seconds[warmups:])
            self.inputs = self.inputs or self.objective.describe(batch.micro_batches[0].data)
            if measure is not None:
                timed = time.perf_counter() - timed_since
                enough = _is_enough(measure, seconds[warmups:], timed)
                stop = self.ranks.any(stop_asked or enough or timed >= measure.seconds)
                continue
            if batch.ends_epoch or self.finished:
                self._end_epoch(batch.position.epoch)
            reached = wanted is not None and self.step - self.first_step >= wanted
            stop = self.finished or stop_asked or reached
            if stop_asked and not reached and not self.finished and self.looks is not None:
                self.looks.at_a_stop(batch)
            if stop or save:
                self._save(final=stop)
        if measure is None:
            self._save(final=True)
        elif self.evaluation is not None:
            self.evaluation_seconds.append(self.evaluation.seconds())
        return self._result(seconds, setup_seconds, warmups)

    def _is_last(self, batch: GlobalBatch, limit: int | None) -> bool:
        """Whether the step on ``batch`` is this training's last, of at most ``limit`` in this call."""
        if limit is not None and self.step + 1 - self.first_step >= limit:
            return True
        epochs = self.hparams.epochs
        return epochs is not None and batch.ends_epoch and batch.position.epoch + 1 >= epochs

    def _train_step(self, batch: GlobalBatch, save_due: bool) -> tuple[bool, bool]:
        """One optimizer step; whether a rank was asked to stop, and whether a checkpoint is due."""
        # Nothing that the optimizer did shows in the first loss and its gradients.
        with common_to_alike(self.step == 0):
            loss, stop, save = self._compute_gradients(batch, save_due)
        if self.hparams.clip_grad_norm is not None:
            self.parallel.clip_gradients(self.hparams.clip_grad_norm)
        # What it draws is the same on all ranks.
        rng.seed(self.hparams.seed, "optimizer", self.step)
        with optimizers.stepping(self.hparams, self.parallel):
            self.optimizer.step()
        if self.step == self.first_step:
            self.own_state.values()  # what can't be kept is told at once
        self.optimizer.zero_grad(set_to_none=True)
        if not self.beyond:
            self.scheduler_step()
        self.step += 1
        self.metrics["loss"] = loss
        self.epoch_sum += loss
        self.epoch_batches += 1
        epoch, in_epoch = batch.position
        self.position = Position(epoch + 1, 0) if batch.ends_epoch else Position(epoch, in_epoch + 1)
        return stop, save

    def _compute_gradients(self, batch: GlobalBatch, save_due: bool) -> tuple[float, bool, bool]:
        """The loss, of which the gradients are then there; whether to stop, and whether to save."""
        model, number = self.parallel, self.step + 1
        # Loss, what it is a sum over, stop, save, missing gradients, and what the loss's rule wants checked:
        # in one message, so that all ranks act on the same step.
        news = torch.zeros(5, dtype=torch.float64, device=self.ranks.device)
        self.objective.begin(batch.samples)
        buffers = ChangingBuffers(model) if self.step == self.first_step else None
        for index, micro_batch in enumerate(batch.micro_batches):
            rng.seed(self.hparams.seed, "step", self.step, index, model.share)
            last = index == len(batch.micro_batches) - 1
            total, over = model.backward(
                self.objective, micro_batch.data, micro_batch.samples, 1 / batch.samples, last
            )
            news[0] += total
            news[1] += over
            if buffers is not None:
                buffers.look(last=last)
        news[2] = float(self.ranks.stop_requested())
        news[3] = float(save_due and self.ranks.is_first)
        news[4] = model.missing_gradients()
        news = torch.cat([news, self.objective.end()])
        if self.ranks.size > 1:
            dist.all_reduce(news)
        loss_sum, over_all, stop, save, missing, *tally = news.tolist()
        rules.check(tally, f"at step {number}")
        loss = loss_sum / over_all if over_all else math.nan
        self.counted = over_all
        if not math.isfinite(loss) and not self.beyond:
            raise NotANumberError(
                f"loss is {loss} at step {number} (epoch {batch.position.epoch}); the job stopped there: "
                "lower lr, set clip_grad_norm, or check the data for NaN and for batches without targets"
            )
        model.gradients_missing = missing > 0
        model.finish_gradients()
        if over_all != batch.samples:
            model.scale_gradients(batch.samples / over_all)
        return loss, stop > 0, save > 0

    def _report_step(self, batch: GlobalBatch, took: float, seconds: list[float]) -> None:
        left = None if self.total is None else self.total - self.step
        self.ranks.emit(
            "step",
            step=self.step,
            epoch=batch.position.epoch,
            loss=self.metrics["loss"],
            seconds=took,
            samples_per_second=batch.samples / took,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            eta_seconds=None if left is None else left * statistics.median((seconds or [took])[-50:]),
        )

    def _end_epoch(self, epoch: int) -> None:
        self.metrics["epoch_loss"] = self.epoch_sum / self.epoch_batches
        self.epoch_sum, self.epoch_batches = 0.0, 0
        if self.evaluation is not None:
            began = time.perf_counter()
            loss, self.own_metrics = self.evaluation.run()
            self.metrics["eval_loss"] = loss
            self.evaluation_seconds.append(time.perf_counter() - began)
            own = {"metrics": self.own_metrics} if self.own_metrics else {}
            self.ranks.emit("eval", step=self.step, epoch=epoch, eval_loss=loss, **own)

    def _save_due(self, now: float) -> bool:
        every, seconds = self.request.checkpoint_batches, self.request.checkpoint_seconds
        by_count = every is not None and self.step + 1 - self.tried_step >= every
        rest = self.checkpoints.rest_seconds if self.checkpoints else 0.0
        by_time = seconds is not None and now - self.tried_at >= max(seconds, rest)
        return by_count or by_time

    def _save(self, *, final: bool) -> None:
        if self.checkpoints is None:
            return
        if self.saved_step != self.step:
            step = self.step
            looked = step if self.looks is None else self.looked
            extra = {
                "seed": self.hparams.seed,
                "step": step,
                "epoch": self.position.epoch,
                "batch": self.position.batch,
                "epoch_sum": self.epoch_sum,
                "epoch_batches": self.epoch_batches,
                "metrics": self.metrics,
                "own_metrics": self.own_metrics,
                "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
                "technique": self.request.technique,
                "devices": self.ranks.size,
                "looked": looked,
            }

            def saved(path: Path, seconds: float) -> None:
                self.checkpoint = str(path)
                self.ranks.emit("checkpoint", step=step, path=str(path), seconds=seconds)

            try:
                self.checkpoints.save(step, self.state, extra, saved, sure=looked)
                self.saved_step = step
            except checkpoints.CheckpointError as error:
                if final:
                    raise
                self.warn(f"{error}; training goes on")
            self.tried_step, self.tried_at = step, time.perf_counter()
        if final:
            self.checkpoints.finish()

    def _resume(self, saved: checkpoints.Checkpoints) -> None:
        found = saved.load(self.state)
        if found is None:
            return
        path, extra = found
        self.checkpoint = str(path)
        self.step = extra["step"]
        self.position = Position(extra["epoch"], extra["batch"])
        self.epoch_sum, self.epoch_batches = extra["epoch_sum"], extra["epoch_batches"]
        # Before anybody looked again, the trial's comparison was all there was.
        self.looked = extra.get("looked", self.step)
        before, now = (extra["technique"], extra["devices"]), (self.request.technique, self.ranks.size)
        if self.looked < self.step and before != now:
            self.warn(
                f"{before[0]} x {before[1]} trained up to step {self.step}, and was last compared with one "
                f"device at step {self.looked}; {now[0]} x {now[1]} goes on from there"
            )
        self.metrics.update(extra["metrics"])
        self.own_metrics = extra.get("own_metrics", {})
        if saved.changes and self.finished:
            changes = "; ".join(map(str, saved.changes))
            raise JobError(
                f"checkpoint {path} is at the end of a training under another definition ({changes}), and "
                "nothing is left to train: start the job from scratch"
            )

    def _result(self, seconds: list[float], setup_seconds: float, warmups: int) -> dict[str, Any]:
        # The first batches are slow; they count as such where there are others to compare them with.
        first, steady = seconds[:warmups], seconds[warmups:]
        if not steady:
            first, steady = [], seconds
        median = statistics.median(steady) if steady else 0.0
        mean = statistics.fmean(steady or [0.0])
        return {
            "status": "finished" if self.finished else "stopped",
            "steps": self.step,
            "batches": len(seconds if self.request.measure is None else steady),
            "batches_per_epoch": self.data.batches_per_epoch or 0,
            "total_batches": self.total,
            **self.metrics,
            "metrics": self.own_metrics,
            "seconds": time.perf_counter() - self.started,
            "setup_seconds": setup_seconds,
            "warmup_seconds": max(0.0, sum(first) - len(first) * mean),
            "seconds_per_batch": mean,
            "spread": _interquartile_range(steady) / median if median else 0.0,
            "evaluation_seconds": statistics.fmean(self.evaluation_seconds or [0.0]),
            "checkpoint": self.checkpoint,
            "inputs": self.inputs,
            "decided": self.parallel.decided,
        }

    def warn(self, message: str) -> None:
        """Tell the user."""
        self.ranks.emit("warning", message=message)
        if self.ranks.is_first:
            warnings.warn(message, stacklevel=2)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_enough(measure: Measure, seconds: list[float], timed: float) -> bool:
    """Whether the timed batches tell how long a batch takes."""
    if len(seconds) < measure.batches or timed < measure.least_seconds:
        return False
    if timed >= measure.precise_seconds or len(seconds) < 2:
        return True
    standard_error = statistics.stdev(seconds) / math.sqrt(len(seconds))
    return standard_error <= _PRECISION * statistics.fmean(seconds)


def _interquartile_range(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
