"""Spot checks while a job trains: does its technique still train as one device does?

The guard's steps are the first; an auxiliary loss may begin later, and the batches of a stream may become
others. So at a few steps, and at the last (where that is on one sample, at the one before, too), the batch of
that step goes through a plain loop and through the technique, both from the weights, buffers and counters of
that moment; what differs stops the job. Both are undone: training is as if there had been none. Then the step
itself is taken, and looked at.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow import library
from saturn_airflow.launch import failures, host_memory, job_log
from saturn_airflow.launch.request import ChangesResultError, NotANumberError
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism import forward_writes
from saturn_airflow.parallelism.module_state import ModuleState
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import model_attributes, of_all_ranks, precision, rng, stepping
from saturn_airflow.training.base_training import BaseTraining
from saturn_airflow.training.batches import Cut, GlobalBatch
from saturn_airflow.training.guarding import comparing, updates, whole
from saturn_airflow.training.guarding.differences import Comparison, Difference
from saturn_airflow.training.guarding.few_samples import numbers_of_samples
from saturn_airflow.training.guarding.plain import PlainLoop, Step, stateful_of
from saturn_airflow.training.guarding.randomness import without_randomness
from saturn_airflow.training.guarding.samples import buffers_of, singles
from saturn_airflow.training.guarding.updates import Updates
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.job_globals import put_into_functions
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.loading import load_model
from saturn_airflow.training.nested import copied
from saturn_airflow.training.switched import switch
from saturn_airflow.training.without_group import without_group

# The share of a training's steps that all spot checks together may take as long as.
_SHARE = 0.01
# Weights that have been trained make more noise than fresh ones: of the guard's tolerances, so many times.
SLACK = 10.0
# A spot check that takes longer than this, in seconds, is not made when training is told to stop.
_SECONDS_AT_A_STOP = 1.0
_NO_ROOM = "a plain loop beside it takes more memory than there is"


def checked_steps(total: int | None, cost: float, seed: int) -> list[int]:
    """The steps, from 1, that are checked besides the last: 10, 100, 1000 and one between each two of them
    that ``seed`` draws, as far as all together cost little.

    :param total: steps of the training; None where nobody knows.
    :param cost: of one spot check, in steps.
    """
    end = total if total is not None else 10**9
    tens = [10**power for power in range(1, 10) if 10**power < end]
    generator = rng.generator(seed, "looks")
    drawn = [ten + int(torch.randint(1, 9 * ten, (1,), generator=generator)) for ten in tens]
    if total is None:
        affordable: list[int] = []
        for step in tens:
            affordable += [step] if step * _SHARE >= (len(affordable) + 1) * cost else []
        return affordable
    # A late one vouches for more steps: for all since the one before it.
    latest_first = [*reversed(tens), *(step for step in reversed(drawn) if step < end)]
    # One less, since the last step is checked, too.
    return sorted(latest_first[: max(0, int(_SHARE * total / cost) - 1)])


@dataclass
class PlainTake:
    """What the plain loop made of a batch, or why there is nothing to compare with."""

    samples: int = 0
    step: Step | None = None
    number_format: torch.dtype = torch.float64
    why_not: str = ""


class LoopSpotChecks:
    """The spot checks of one training on this rank.

    :param training: with its technique in place, and its optimizer.
    :param bare: a copy of the job's model without its weights, on the first rank.
    :param aliases: the first names of parameters and buffers.
    """

    def __init__(self, training: BaseTraining, bare: nn.Module | None, aliases: dict[str, str]) -> None:
        self._training = training
        self._bare = bare
        self._aliases = aliases
        self._ranks = training.ranks
        self._few, _ = numbers_of_samples(self._ranks.size, training.hparams.accumulate)
        # As they were before a checkpoint changed them.
        self._attributes = training.state.attributes
        # The plain loop computes alone what the ranks compute together, and the technique once more.
        steps = checked_steps(training.total, self._ranks.size + 2, training.hparams.seed)
        self._steps = frozenset(steps)
        self._seconds = math.inf
        self._of_others: model_attributes.Attributes = {}
        self._saturns = library.is_saturns(training.request.technique)
        self._updates = self._make_updates()
        # The last step that was compared before this one, where the next one is looked at.
        self._compared_before: int | None = None

    def _make_updates(self) -> list[Updates]:
        return [Updates(self._training.optimizer, self._training.state.groups, self._names())]

    def before(self, batch: GlobalBatch, *, last: bool) -> float:
        """Check the step that comes next, if it is its turn; every rank must call this together.

        :param last: whether this is the last step.
        :returns: how many seconds it took.
        :raises ChangesResultError: when the technique changes the result by now.
        """
        training = self._training
        self._compared_before = None
        # No trial has resumed anything; Saturn's own are tested.
        resumed = training.step == training.first_step > 0 and not self._saturns
        due = last or resumed or training.step + 1 in self._steps
        if not (due or self._last_is_of_one_sample(batch)):
            return 0.0
        self._compared_before = training.last_compared
        return self._check(batch, training.step + 1)

    def _last_is_of_one_sample(self, batch: GlobalBatch) -> bool:
        """Whether the step after that on ``batch`` is the last, and on what nobody cuts: it shows nothing."""
        training = self._training
        batches, samples = training.data.extent
        if training.step + 2 != training.total or batches is None or samples is None:
            return False
        return batch.position.batch + 2 == batches and samples - (batches - 1) * batch.samples == 1

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around the step that comes next: where :meth:`before` has checked it, see that the optimizer takes
        it as its class does, and that nobody else changes weights; every rank must call this together.

        :raises ChangesResultError: when that is not so.
        """
        if self._compared_before is None or not self._updates:
            yield
            return
        training = self._training
        with updates.watched(self._updates):
            yield
            training.parallel.complete_steps()
        if found := updates.everyones(self._updates, training.step, self._ranks):
            training.last_compared = self._compared_before
            self._refuse(comparing.describe(found), training.step)

    def at_a_stop(self, batch: GlobalBatch) -> None:
        """Check once more before training stops early, where that takes no time.

        :raises ChangesResultError: as :meth:`before`.
        """
        if not self._ranks.any(self._seconds > _SECONDS_AT_A_STOP):
            self._check(batch, self._training.step)

    def _check(self, batch: GlobalBatch, step: int) -> float:
        began = time.perf_counter()
        self._training.parallel.complete_steps()
        with job_log.muted():
            self._compare_step(batch, step)
        self._seconds = time.perf_counter() - began
        self._ranks.emit(
            "looked", step=step, seconds=self._seconds, checked=self._training.last_compared == step
        )
        return self._seconds

    def _compare_step(self, batch: GlobalBatch, step: int) -> None:
        training, job = self._training, self._training.job
        with self._undone(), of_the_job(f"load_dataloader {job.load_dataloader!r}"):
            data = batch.whole()
        self._of_others = self._attributes_of_all()
        takes = [(job, batch.samples)]
        if job.hparams.precision == "bf16" and training.objective.exact != "bf16":
            # Much of what differs is lost in bf16; a few samples in float32 take no more memory.
            exact = dataclasses.replace(job, hparams=dataclasses.replace(job.hparams, precision="float32"))
            takes.append((exact, min(batch.samples, self._few)))
        why_not = ""
        with precision.exactly(job.hparams.precision):
            for one_job, samples in takes:
                why_not = why_not or self._compare(one_job, batch, data, samples, step)
        if why_not:
            training.warn(f"not checked again at step {step} that nothing differs from one device: {why_not}")
        else:
            training.last_compared = step

    def _compare(self, job: Job, batch: GlobalBatch, data: Any, samples: int, step: int) -> str:
        """Take a plain step and the technique's on a batch; why that could not be, if so.

        :raises ChangesResultError: when they differ.
        """
        weights = self._weights()
        plain = PlainTake(why_not="the whole model does not fit in the host's memory")
        if weights is not None and self._ranks.is_first:
            plain = self._plain(job, weights, data, batch.samples, samples)
        plain = self._told_by_first(plain)
        if plain.step is None:
            return plain.why_not
        if plain.samples < batch.samples:
            batch = self._fewer(batch, data, plain.samples)
        try:
            got = self._technique(job, batch)
        except NotANumberError:
            return "the loss is not a number"
        comparison = Comparison(plain.number_format, SLACK)
        shares = self._training.parallel.shares
        found = comparing.put_together(comparison, plain.step, got, self._ranks, shares)

        def off(way: int) -> Step | None:
            assert weights is not None
            other = PlainTake(plain.samples, number_format=plain.number_format)
            self._take_plain_step(other, job, weights, data, batch.samples, hooks=False, off=way)
            return other.step

        self._refuse_beyond_noise(found, plain, off, step)
        return ""

    def _refuse_beyond_noise(
        self,
        found: list[Difference],
        plain: PlainTake,
        off: Callable[[int], Step | None],
        step: int,
    ) -> None:
        """Refuse what was found, unless it is noise; where memory does not suffice to tell, nothing is.

        :param off: takes the plain step once more, put off by rounding in one way or another.
        :raises ChangesResultError: when it is none.
        """

        def noise(way: int) -> dict[str, float]:
            try:
                other = off(way)
            except Exception as error:
                if not failures.ran_out_of_memory(error):
                    raise
                self._training.warn(f"it can't be told whether rounding makes what differs: {_NO_ROOM}")
                return {}
            finally:
                if self._ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
            assert plain.step is not None
            assert other is not None
            return comparing.sizes_of(Comparison(plain.number_format, SLACK).whole(plain.step, other))

        # Only what is the same on all ranks decides.
        if real := comparing.beyond_noise(found, noise, self._ranks):
            self._refuse(comparing.describe(real), step)

    def _refuse(self, differences: str, step: int) -> None:
        training, technique = self._training, self._training.request.technique
        since = f"step {training.last_compared}" if training.last_compared else "its first steps"
        words = re.sub(r" (of|in|after) step 1\b", "", differences)
        if training.checkpoints is not None:
            training.checkpoints.set_aside(training.last_compared)
        raise ChangesResultError(
            f"{technique} x {self._ranks.size} changes the result at step {step}, and did not when it was "
            f"last compared with one device, in {since}: {words}.{self._changed()} What it trained since is "
            "set aside. If the samples of a batch are coupled now, say Job(couples_batch=True), or leave the "
            "technique out of Job(techniques=...); if it may all the same, or this is a mistake, "
            f"Job(trust=[{technique!r}]) leaves it unchecked"
        )

    def _changed(self) -> str:
        """In words what training has put in the place of others since its first steps."""
        structure = self._training.structure
        everyones = self._ranks.everyones([] if structure is None else structure.changed())
        if not (names := sorted({name for changed in everyones for name in changed})):
            return ""
        return (
            f" Training has changed {', '.join(names[:5])} (modules, functions or hooks), which the copy on "
            "one device lacks: have them there from the first, and let them look at a buffer."
        )

    def _attributes_of_all(self) -> model_attributes.Attributes:
        """What has changed of modules' attributes, JSON-ready, where ranks compute parts of the model."""
        if self._training.parallel.shares == self._ranks.size:
            return {}
        own = self._attributes.noted(self._attributes.values()[0])
        return of_all_ranks.merged(self._ranks.everyones(own))

    def _weights(self) -> whole.Tensors | None:
        parallel = self._training.parallel
        wanted = whole.bytes_to_gather(parallel)
        # On a CPU there are gradients too.
        wanted *= 2 if self._ranks.device.type == "cpu" else 1
        if self._ranks.any(self._ranks.is_first and wanted > host_memory.available()):
            return None
        return whole.gathered(parallel)

    def _plain(
        self, job: Job, weights: whole.Tensors, data: Any, of: int, samples: int, *, hooks: bool = True
    ) -> PlainTake:
        """A plain step on ``samples`` of a batch, or on fewer where the memory does not suffice."""
        why_not = ""
        for number in dict.fromkeys((samples, min(samples, self._few))):
            plain = PlainTake(number)
            try:
                self._take_plain_step(plain, job, weights, data, of, hooks=hooks)
                return plain
            except Exception as error:
                # torch.func's gradients don't bear that.
                if hooks and "saved tensor hooks" in str(error):
                    return self._plain(job, weights, data, of, samples, hooks=False)
                why_not = f"the plain loop raised {type(error).__name__}: {str(error)[:200]}"
                if not failures.ran_out_of_memory(error):
                    break
                why_not = _NO_ROOM
            finally:
                if self._ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
        return PlainTake(why_not=why_not)

    def _take_plain_step(
        self,
        plain: PlainTake,
        job: Job,
        weights: whole.Tensors,
        data: Any,
        of: int,
        *,
        hooks: bool,
        off: int | None = None,
    ) -> None:
        training, device = self._training, self._ranks.device
        attributes = model_attributes.changed(
            self._attributes.given, model_attributes.plain_attributes(training.parallel.model)
        )
        kept = training.state.globals
        in_functions = kept.values()[0].get("", {}) if kept is not None else {}
        with self._undone(), torch.compiler.set_stance("force_eager"), without_randomness(), without_group():
            model = whole.without_weights(self._bare) if self._bare is not None else None
            model = model or load_model(training.job)
            for gone in (self._attributes.gone(), self._of_others):
                model_attributes.take_away(model, gone)
            model = whole.with_weights(model, weights, attributes)
            model_attributes.put(model, self._attributes.objects(), device)
            model_attributes.put(model, model_attributes.unswitched(self._of_others), device)
            put_into_functions(model, in_functions)
            if off is not None:
                comparing.put_off_by_rounding(model, plain.number_format, off)
            take = training.data.layout.take
            data = copied(data)
            if plain.samples < of:
                data = take(data, of, range(plain.samples)).data
            parts = [MicroBatch(data, plain.samples)]
            if job.in_micro_batches:
                cut = Cut(job.hparams.accumulate)
                parts = [take(data, plain.samples, rows) for rows in cut.of(plain.samples)]
            loop = PlainLoop(job, model.to(device), device, training.objective.rule)
            # Not before: what does not ask for gradients now was to be trained when the optimizer was made.
            of_others = model_attributes.switched(self._of_others)
            switch(model, of_others or self._attributes.switches.values())
            before = loop.weights()
            with comparing.noting_formats(plain, model, hooks=hooks):
                loss, counted, gradients = loop.gradients(parts)
            stateful = self._stateful()
            plain.step = Step(loss, counted, gradients, before, loop.weights(), buffers_of(model), stateful)

    def _technique(self, job: Job, batch: GlobalBatch) -> Step:
        """The technique's step, as far as this rank sees it."""
        own = copy.copy(self._training)
        copies = [part._replace(data=copied(part.data)) for part in batch.micro_batches]
        batch = dataclasses.replace(batch, micro_batches=copies)
        own.first_step = -1
        own.ranks = dataclasses.replace(own.ranks, _stop_requested=lambda: False)
        if job is not own.job:
            own.objective = own.objective.exactly()
        with self._undone(), torch.compiler.set_stance("force_eager"), without_randomness():
            try:
                loss = stepping.compute_gradients(own, batch)
                if own.hparams.clip_grad_norm is not None:
                    own.parallel.clip_gradients(own.hparams.clip_grad_norm)
                gradients = comparing.gradients_of(own.parallel, self._aliases)
                buffers = buffers_of(own.parallel.model, self._aliases)
                weights = singles({name: p for p, name in self._names().items()})
            finally:
                own.parallel.drop_gradients()
        return Step(loss, own.counted, gradients, {}, weights, buffers, self._stateful())

    def _names(self) -> dict[nn.Parameter, str]:
        return updates.names_in(self._training.parallel.model, self._aliases)

    def _fewer(self, batch: GlobalBatch, data: Any, samples: int) -> GlobalBatch:
        """The first ``samples`` of a batch, cut as the whole of it is."""
        take = self._training.data.layout.take
        few = take(data, batch.samples, range(samples)).data
        cut = [take(few, samples, rows) for rows in self._training.cut.of(samples)]
        return dataclasses.replace(batch, samples=samples, micro_batches=cut)

    def _stateful(self) -> frozenset[str]:
        """Names of the parameters for which a gradient of zeros is not the same as none."""
        optimizer, names = self._training.optimizer, self._names()
        decayed = (p for g in optimizer.param_groups if g.get("weight_decay") for p in g["params"])
        return stateful_of([optimizer], names) | {names[p] for p in decayed if p in names}

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What changes inside besides gradients is as it was afterwards."""
        model = self._training.parallel.model
        users = UsersState(self._training.job, model)
        with ModuleState(model.modules()).put_back(), users.put_back(), self._weights_put_back():
            yield

    def _weights_put_back(self) -> AbstractContextManager[None]:
        """Around passes that may change weights, as they do a teacher's."""
        return forward_writes.put_back(self._training.parallel.model)

    def _told_by_first(self, plain: PlainTake) -> PlainTake:
        told: list[Any] = [plain]
        if self._ranks.size > 1:
            dist.broadcast_object_list(told)
        found: PlainTake = told[0]
        return found


def can_differ(parallel: Parallel, job: Job, technique: str, parameters: Any) -> bool:
    """Whether a training is more than a plain loop, and nobody said that it need not be checked."""
    is_plain = technique == "single" and type(parallel) is Parallel and not parameters
    return technique not in job.trust and not (is_plain and job.hparams.accumulate == 1)
