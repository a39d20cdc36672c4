"""The guard: a technique's first steps beside those of a plain loop, before it may train a job.

The plain loop (:mod:`plain`) takes three steps on a few samples; then the technique takes the same through
the code that trains. They begin with the same weights, nothing is random, and the batches are such that
shares are unequal and one is empty. What differs beyond the number format is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from saturn_airflow import library
from saturn_airflow.launch import failures
from saturn_airflow.launch.request import ChangesResultError, DoesNotFit, NotANumberError
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.status import Status
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import state
from saturn_airflow.training.batches import Cut, Data, GlobalBatch, Position
from saturn_airflow.training.guarding import comparing, first_steps, kept_steps, updates
from saturn_airflow.training.guarding.counting import counts_of, grown
from saturn_airflow.training.guarding.differences import Comparison, Difference
from saturn_airflow.training.guarding.few_samples import met_again
from saturn_airflow.training.guarding.first_steps import RANDOM, WHOLE, Load, PlainSteps
from saturn_airflow.training.guarding.own_plain import gradients_as_seen
from saturn_airflow.training.guarding.parts_that_bend import refuse_bent
from saturn_airflow.training.guarding.plain import Step, stateful_of
from saturn_airflow.training.guarding.randomness import without_randomness
from saturn_airflow.training.guarding.remembered import KnownSamples, lacking
from saturn_airflow.training.guarding.samples import Sample, buffers_of, singles
from saturn_airflow.training.guarding.updates import Updates
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.job_globals import JobGlobals
from saturn_airflow.training.model_attributes import ModelAttributes, spread
from saturn_airflow.training.optim.broken_optimizers import refuse_broken_schedule
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.precision import exact
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.without_group import without_group


class TakeStep(Protocol):
    """Trains on a batch: the loss, and what it was taken over."""

    def __call__(self, batch: GlobalBatch, clip: float | None) -> tuple[float, float | None]:
        """:param clip: the norm to clip gradients to, where the job clips; None for what the job says."""
        ...


# The learning rate of the compared steps: what is compared must not depend on the job's.
_LR = 1e-3


class Guard:
    """Takes the plain steps when it is made; :meth:`compare` takes those of a technique beside them.

    :param technique: its name.
    :param model: the job's, whole, on the CPU; it stays as it is.
    :param load: loads it anew.
    :param data: the job's, and
    :param eval_data: its evaluation data.
    :param kept: the :attr:`kept` of another guard that takes the same plain steps (see :mod:`plain_files`);
        who gives it asks again without it before a refusal counts. What is damaged is taken anew.
    :raises JobError: when the plain loop can't train the job.
    """

    def __init__(
        self,
        job: Job,
        technique: str,
        model: nn.Module,
        load: Load,
        ranks: Ranks,
        data: Data,
        eval_data: Data | None = None,
        kept: bytes = b"",
    ) -> None:
        began = time.perf_counter()
        #: The job as it is compared.
        self.job = _comparable(job, model)
        # In float32 all of a bf16 job's batch may not fit where its training does.
        cuts = (technique != "single" or job.hparams.accumulate > 1) and job.hparams.precision != "bf16"
        self._technique = f"{technique} x {ranks.size}"
        self._name = technique
        self._ranks = ranks
        self._data = data
        self._eval_data = eval_data
        self._load = load
        self._model = weakref.ref(model)
        self._aliases = state.aliases(model)
        self._users = UsersState(self.job, model)
        if not job.own_step:
            with self._users.put_back():
                refuse_broken_schedule(job, model, data)
        known = kept_steps.loaded(kept) if kept else None
        told: list[Any] = [kept]
        if known is None:
            if ranks.is_first:
                ranks.emit("plain_steps", taken=True)
                with without_group():
                    plain = first_steps.take(self.job, model, load, ranks, data, eval_data, whole_batch=cuts)
                ranks.emit("plain_steps", taken=False)
                told = [kept_steps.dumped(plain)]
            if ranks.size > 1:
                dist.broadcast_object_list(told)
        #: The plain steps, for guards to come.
        self.kept: bytes = told[0]
        self._taken_here = known is None
        plain_steps = known or kept_steps.loaded(self.kept)
        assert plain_steps is not None
        self._plain: PlainSteps = plain_steps
        self._counted_before: dict[str, float] = {}
        #: What guarding took.
        self.seconds = time.perf_counter() - began
        #: What of that training will need as well: the first step is slower than the next.
        self.warmup_seconds = 0.0
        #: What the technique's step on a whole batch took, if it took one.
        self.whole_seconds: float | None = None

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Around what the technique does: what fails there and does not in the plain loop is the technique's.

        What one of the user's own raises itself may be a mistake in it, and mended by another day.

        :raises DoesNotFit: from what is neither that, nor a failure of the machine or of another rank.
        """
        try:
            yield
        except DoesNotFit:
            raise
        except Exception as error:
            met = failures.describe(error)
            # Such as too many open files, which there are not another night.
            passing = met.peer_lost or isinstance(error, OSError)
            own = met.status == Status.FAILED and not passing and library.is_saturns(self._name)
            if not (own or isinstance(error, JobError)):
                raise
            said = failures.said(error) if isinstance(error, JobError) else met.reason
            told = f"{said}\n{met.traceback}".strip()
            raise DoesNotFit(f"{self._technique} can't train what one device can: {told}") from error

    def compare(
        self,
        parallel: Parallel,
        optimizers: Sequence[torch.optim.Optimizer],
        cut: Cut,
        step: TakeStep,
        evaluate: Callable[[int], float] = lambda samples: math.nan,
    ) -> str:
        """Take the technique's steps; every rank calls this together.

        :param optimizers: the job's, which have just been made.
        :param evaluate: the mean loss over so many samples of the evaluation data.
        :returns: the verdict: ``"exact"``, ``"distribution"`` where only the random numbers are others, or
            ``"not checked: ..."``.
        :raises ChangesResultError: when something differs.
        :raises DoesNotFit: when the technique can't train the job.
        """
        began = time.perf_counter()
        if not self._plain.steps:
            return "not checked: the loss is not a number on one device either"
        sizes = self._plain.sizes
        few = self._data.few(sizes)
        with of_the_job(f"load_dataloader {self.job.load_dataloader!r}"):
            upcoming = enumerate(few.batches(Position(), cut, len(sizes)))
            numbered = {number: batch for number, batch in upcoming if number not in self._plain.skipped}
            batches = list(met_again(numbered, cut, few).values())
        taken: list[float] = []
        with self.blaming(), torch.compiler.set_stance("force_eager"):
            self._refuse_for(self._differences(parallel, optimizers, batches, step, evaluate, taken))
            refuse_bent(self._plain, self.job, parallel, self._technique)
            self._refuse_spread(parallel, optimizers)
            alike = not self._plain.drew or self._draws_alike(step, batches[-len(RANDOM) :])
        self._note_seconds(taken, batches)
        self.seconds += time.perf_counter() - began
        return "exact" if alike else "distribution"

    def _differences(
        self,
        parallel: Parallel,
        optimizers: Sequence[torch.optim.Optimizer],
        batches: Sequence[GlobalBatch],
        step: TakeStep,
        evaluate: Callable[[int], float],
        taken: list[float],
    ) -> list[Difference]:
        """Take the steps that the plain loop took, and evaluate where it did: what differs.

        :param taken: gets the seconds of each.
        """
        plain, found = self._plain, list[Difference]()
        comparison = Comparison(plain.number_format)
        remembered = self._remembering(parallel)
        names = updates.names_in(parallel.model, self._aliases)
        # A training step of the job's own may do with its optimizers as it likes.
        made = [] if self.job.own_step else [Updates(one, GroupState(one), names) for one in optimizers]
        expected_losses, shares = list(plain.evaluations), self._shares(parallel)
        self._counted_before = counts_of(self.job, parallel.model)

        def compare_evaluation() -> list[Difference]:
            expected = expected_losses.pop(0)
            if not math.isfinite(expected):
                return []
            return comparison.evaluations(expected, evaluate(plain.sizes[0]))

        with without_randomness(own_generators=plain.alone):
            for expected, batch in zip(plain.steps, batches, strict=False):
                started = time.perf_counter()
                with updates.watched(made):
                    got = self._take(parallel, optimizers, step, batch, expected)
                taken.append(time.perf_counter() - started)
                found += comparing.put_together(comparison, expected, got, self._ranks, shares)
                if not math.isfinite(got.loss):
                    return found
                found += updates.everyones(made, len(taken), self._ranks)
                if len(taken) == 1:
                    found += self._in_parts(remembered)
                    if len(expected_losses) > 1:
                        found += compare_evaluation()
            if expected_losses:
                found += compare_evaluation()
        return found

    def _shares(self, parallel: Parallel) -> int:
        """How many shares of a batch ranks compute; with steps of a job's own, each the whole model's."""
        return self._ranks.size if self.job.own_step else parallel.shares

    def _refuse_spread(self, parallel: Parallel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """:raises DoesNotFit: where something that no checkpoint could hold has parts of what is split."""
        where = f"each device has a part of the weights under {self._name}"
        if name := spread(parallel.model):
            raise DoesNotFit(
                f"the model's attribute {name!r} holds tensors like the weights; {where}, and of those, "
                "which no checkpoint can hold: a job that is resumed would lose them. Use a technique that "
                "keeps weights whole, such as ddp or spill"
            )
        stepped = (p for one in optimizers for group in one.param_groups for p in group["params"])
        if not any(isinstance(p, DTensor) for p in stepped):
            return
        try:
            for one in optimizers:
                state.refuse_unsaved(one)
        except JobError as error:
            raise DoesNotFit(
                f"{error}; {where}, and of what is kept beside them. Keep tensors of a parameter as values "
                "of the optimizer's state[parameter], or use ddp or spill"
            ) from error

    def _remembering(self, parallel: Parallel) -> KnownSamples | None:
        """What sees what steps remember of samples, where each rank computes some of a batch's."""
        if not self._plain.remembered or parallel.shares == 1:
            return None
        attributes = ModelAttributes(parallel.model, self._ranks.device)
        return KnownSamples(parallel.model, attributes, JobGlobals(self.job, parallel.model))

    def _in_parts(self, remembered: KnownSamples | None) -> list[Difference]:
        """What each rank remembers of its own share alone; every rank calls this together."""
        if remembered is None:
            return []
        there = self._ranks.everyones(lacking(self._plain.remembered, remembered.keys()))
        names = dict.fromkeys(itertools.chain.from_iterable(there))
        how = "is that of its own share alone on each device"
        return [Difference(f"what {name!r} remembers of samples", how, 1) for name in names]

    def _note_seconds(self, taken: Sequence[float], batches: Sequence[GlobalBatch]) -> None:
        """Note what the steps on ``batches`` tell besides."""
        first, *others = ((batch.samples, seconds) for batch, seconds in zip(batches, taken, strict=False))
        # A smaller batch would be quicker for another reason than that the first one warmed up.
        as_large = [seconds for samples, seconds in others if samples == first[0]]
        self.warmup_seconds = max(0.0, first[1] - min(as_large, default=first[1]))
        sizes = [size for number, size in enumerate(self._plain.sizes) if number not in self._plain.skipped]
        if sizes[len(taken) - 1] == WHOLE:
            self.whole_seconds = taken[-1]

    def _take(
        self,
        parallel: Parallel,
        optimizers: Sequence[torch.optim.Optimizer],
        step: TakeStep,
        batch: GlobalBatch,
        expected: Step,
    ) -> Step:
        """One step of the technique, as far as this rank sees it.

        :param expected: the plain loop's.
        """
        names = {p: self._aliases.get(name, name) for name, p in parallel.model.named_parameters()}
        looking = gradients_as_seen(optimizers, names)
        if not self.job.own_step:
            looking = self._gradients_of(parallel, optimizers)
        noting = bool(expected.unclipped)
        with looking as gradients, comparing.noting_unclipped(parallel, self._aliases, noting) as unclipped:
            try:
                loss, counted = step(batch, expected.clip)
            except NotANumberError:
                loss, counted = math.nan, None
        stateful = stateful_of(optimizers, names)
        buffers = buffers_of(parallel.model, self._aliases)
        weights = singles({name: p for p, name in names.items()})
        # Where accumulate makes several passes of a batch, counters of passes are not those of batches.
        as_one = self.job.hparams.accumulate == 1 or self.job.in_micro_batches
        counts = grown(self._counted_before, counts_of(self.job, parallel.model)) if as_one else {}
        return Step(loss, counted, gradients, {}, weights, buffers, stateful, counts, unclipped=unclipped)

    @contextmanager
    def _gradients_of(
        self, parallel: Parallel, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[dict[str, Sample | None]]:
        """The gradients of all that this rank trains, as the optimizer sees them."""
        gradients: dict[str, Sample | None] = {}
        (optimizer,) = optimizers

        def look(*_: Any) -> None:
            if not gradients:  # the step of its base class is a step, too, and may find others
                gradients.update(comparing.gradients_of(parallel, self._aliases))

        hook = optimizer.register_step_pre_hook(look)
        # The optimizer's own may change them, as those do that clip.
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(hook.id, last=False)
        try:
            yield gradients
        finally:
            hook.remove()

    def _refuse_for(self, differences: Sequence[Difference]) -> None:
        """Refuse the technique unless what differs in it is noise in the plain loop, too.

        :raises ChangesResultError: when there is more, or the plain steps were taken elsewhere, where weights
            or data may have been others.
        """
        if differences and not self._taken_here:
            raise ChangesResultError(f"not as plain steps taken before: {comparing.describe(differences)}")
        if not differences:
            return
        if self._samples_differ():  # which no other plain loop's noise excuses
            what = (
                f"load_dataloader {self.job.load_dataloader!r} gave different samples on different "
                "ranks; draw them from torch's, numpy's or Python's global generator, which Saturn "
                "seeds, or from one that you seed"
            )
        elif real := comparing.beyond_noise(differences, self._noise, self._ranks):
            what = comparing.describe(real)
        else:
            return
        raise ChangesResultError(
            f"{self._technique} changes the result: {what}. If it may all the same, or "
            f"this is a mistake, Job(trust=[{self._name!r}]) leaves it unchecked"
        )

    def _samples_differ(self) -> bool:
        """Whether ranks were given different data; every rank calls this together."""
        if self._ranks.size == 1:
            return False
        with of_the_job(f"load_dataloader {self.job.load_dataloader!r}"):
            batch = next(self._data.few(self._plain.sizes[:1]).batches(Position(), Cut(), 1))
        leaves = [tree_leaves(part.data) for part in batch.micro_batches]
        own = [str(leaf.sum()) for part in leaves for leaf in part if isinstance(leaf, torch.Tensor)]
        return any(other != own for other in self._ranks.everyones(own))

    def _noise(self, way: int) -> dict[str, float]:
        """What differs, and how far, in a plain loop from weights that are off by their format's last digits.

        Some models make such differences large: Adam those of gradients that are really 0, BatchNorm over few
        values those of any.
        """
        self._users.restore()  # what the technique's steps have changed is no noise
        plain = self._plain
        model = self._load()
        if model is self._model():  # the job's code hands out one and the same, which is trained by now
            return {}
        comparing.put_off_by_rounding(model, plain.number_format, way)
        other = PlainSteps(plain.sizes, plain.device, set(plain.skipped), alone=plain.alone)
        device = torch.device(plain.device)
        with without_group():
            first_steps.take_each(other, self.job, model, self._load, device, self._data, self._eval_data)
        self._users.restore()  # where the job's code refers to its model, it did to the one loaded here
        if other.skipped != plain.skipped:  # these steps are on other batches
            return {}
        comparison = Comparison(plain.number_format)
        steps = zip(plain.steps, other.steps, strict=False)
        found = [d for expected, got in steps for d in comparison.whole(expected, got)]
        for expected, got in zip(plain.evaluations, other.evaluations, strict=False):
            found += comparison.evaluations(expected, got) if math.isfinite(expected) else []
        return comparing.sizes_of(found)

    def _draws_alike(self, step: TakeStep, batches: Sequence[GlobalBatch]) -> bool:
        """Whether the technique draws the random numbers that one device would have drawn, as far as their
        effect on losses tells.

        :raises ChangesResultError: when it does not, and nothing is random about them.
        """
        plain = self._plain
        # From one seed a GPU draws other numbers than a CPU, so these losses can't be compared.
        if not plain.random_losses or plain.device != self._ranks.device.type:
            return self._ranks.size == 1
        for batch, expected in zip(batches, plain.random_losses, strict=True):
            try:
                loss, _ = step(batch, None)
            except NotANumberError:
                return False
            noise = plain.noise_of(expected)
            # Steps add to the noise; what is drawn may show by less than that in a loss.
            allowed = min(100 * noise, max(noise, plain.random_effect / 10))
            if not abs(loss - expected) <= allowed:
                self._refuse_own_seeds(loss, expected, noise)
                # Those of micro-batches are drawn one after the other, which on one device is the result.
                return self._ranks.size == 1 and self.job.hparams.accumulate > 1
        return not plain.hidden_draws or self._ranks.size == 1

    def _refuse_own_seeds(self, loss: float, expected: float, noise: float) -> None:
        """Refuse other random numbers where one device draws the same ones whatever the seed.

        :raises ChangesResultError: when it does: there is one result then, and no distribution.
        """
        if self._plain.random_effect <= noise and abs(loss - expected) > 100 * noise:
            raise ChangesResultError(
                f"{self._technique} changes the result: the job seeds random numbers itself, as by "
                "torch.manual_seed in a forward pass, so that one device draws the same ones whatever the "
                f"seed, and here others are drawn (a loss of {loss:.6g} in the place of {expected:.6g}). "
                "Leave the seeding to Saturn, which seeds for each step, or use one device. If it may differ "
                f"all the same, Job(trust=[{self._name!r}]) leaves it unchecked"
            )


def _comparable(job: Job, model: nn.Module) -> Job:
    """``job`` without what only makes its comparison less exact, or dependent on what does not matter."""
    hparams = dataclasses.replace(
        job.hparams,
        precision=exact(job.hparams.precision, model),
        lr=_LR,
        lr_scheduler=None,
        lr_scheduler_args={},
        compile=False,
    )
    return dataclasses.replace(job, hparams=hparams)
