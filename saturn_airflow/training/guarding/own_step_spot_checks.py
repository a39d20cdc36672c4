"""Spot checks of a training whose model takes its own steps: the whole step is taken, and undone.

Every rank holds the whole model, so that the first takes the plain step with the model that is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from saturn_airflow.launch.request import NotANumberError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.batch_norm import each_rank_alone
from saturn_airflow.parallelism.module_state import copied
from saturn_airflow.parallelism.own_step_replicas import OwnStepReplicas
from saturn_airflow.training import rng
from saturn_airflow.training.base_training import BaseTraining
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.guarding import comparing
from saturn_airflow.training.guarding.differences import Comparison
from saturn_airflow.training.guarding.own_plain import gradients_as_seen, weights
from saturn_airflow.training.guarding.plain import Step, stateful_of
from saturn_airflow.training.guarding.randomness import without_randomness
from saturn_airflow.training.guarding.samples import buffers_of
from saturn_airflow.training.guarding.spot_checks import SLACK, LoopSpotChecks, PlainTake
from saturn_airflow.training.guarding.updates import Updates
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.own_step import shared_step
from saturn_airflow.training.own_step.user_step import OwnStep
from saturn_airflow.training.without_group import without_group


class OwnStepSpotChecks(LoopSpotChecks):
    """The spot checks of one training on this rank, in the job's own precision alone.

    :param own: the step that ``training`` takes by now.
    """

    def __init__(self, training: BaseTraining, own: Callable[[], OwnStep]) -> None:
        super().__init__(training, None, training.aliases)
        self._own = own
        self._named = {p: name for name, p in training.parallel.model.named_parameters()}

    def _make_updates(self) -> list[Updates]:
        return []  # the whole step is compared

    def _compare(self, job: Job, batch: GlobalBatch, data: Any, samples: int, step: int) -> str:
        if job is not self._training.job:
            return ""
        plain = PlainTake(why_not="the plain step raised")
        whole = MicroBatch(data, batch.samples)
        if self._ranks.is_first:
            try:
                with comparing.noting_formats(plain, self._training.parallel.model):
                    plain.step = self._take(dataclasses.replace(batch, micro_batches=[whole]), alone=True)
            except Exception as error:
                plain.why_not = f"the plain step raised {type(error).__name__}: {str(error)[:200]}"
        plain = self._told_by_first(plain)
        if plain.step is None:
            return plain.why_not
        try:
            got = self._take(batch)
        except NotANumberError:
            return "the loss is not a number"
        comparison = Comparison(plain.number_format, SLACK)
        found = comparing.put_together(comparison, plain.step, got, self._ranks, self._ranks.size)

        def off(way: int) -> Step:
            at_once = dataclasses.replace(batch, micro_batches=[whole])
            return self._take(at_once, alone=True, off=(plain.number_format, way))

        self._refuse_beyond_noise(found, plain, off, step)
        return ""

    def _take(
        self, batch: GlobalBatch, *, alone: bool = False, off: tuple[torch.dtype, int] | None = None
    ) -> Step:
        """A step on this rank's part of ``batch``, of which nothing is left afterwards.

        :param alone: without the other ranks.
        :param off: from weights that are off by the last digits of this format, in this way.
        """
        training, own = self._training, self._own()
        model = training.parallel.model
        with self._undone(), torch.compiler.set_stance("force_eager"), without_randomness():
            if off is not None:
                comparing.put_off_by_rounding(model, *off)
            before = weights(self._named)
            own.place(batch, training.step)
            rng.seed(training.hparams.seed, "step", training.step, 0, 0)
            with gradients_as_seen(own.optimizers, self._named) as gradients:
                if alone:
                    with each_rank_alone(model), _by_itself(training.parallel), without_group():
                        (micro_batch,) = batch.micro_batches
                        taken = own.take(micro_batch.data, batch.position.batch, schedule=False)
                        loss = float(taken.loss)
                else:
                    loss, _ = shared_step.take(own, training.parallel, batch, schedule=False)
            stateful = stateful_of(own.optimizers, self._named)
            after = weights(self._named)
            return Step(loss, None, gradients, before, after, buffers_of(model), stateful)

    @contextmanager
    def _weights_put_back(self) -> Iterator[None]:
        """Parameters, gradients and optimizers are afterwards as they were before."""
        kept = [
            (p, p.data, p.data.clone(), p.grad, None if p.grad is None else p.grad.clone(), p.requires_grad)
            for p in self._named
        ]
        own = self._own()
        optimizers = [(one, _copy_of(one)) for one in own.optimizers]
        logged = dict(own.metric_objects.logged)
        try:
            with own.schedulers_held():
                yield
        finally:
            own.metric_objects.logged = logged
            for parameter, data, then, gradient, gradient_then, trained in kept:
                # Into the memory that it had, to which others may refer.
                parameter.data = data.copy_(then)
                parameter.grad = gradient
                if gradient is not None and gradient_then is not None:
                    gradient.copy_(gradient_then)
                parameter.requires_grad_(trained)
            for optimizer, (state, groups, attributes) in optimizers:
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    group.update(values)
                vars(optimizer).update(attributes)


def _copy_of(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, Any], list[dict[str, Any]], dict[str, Any]]:
    memo: dict[int, Any] = {}
    state = {key: copied(value, memo) for key, value in optimizer.state.items()}
    groups = [
        {key: copied(value, memo) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    attributes = {
        key: copied(value, memo)
        for key, value in vars(optimizer).items()
        # torch keeps hooks under these names; who sets one for a compared step takes it away again.
        if key not in ("state", "param_groups", "defaults") and not key.startswith("_optimizer_")
    }
    return state, groups, attributes


@contextmanager
def _by_itself(parallel: Any) -> Iterator[None]:
    """Have a rank keep its gradients to itself."""
    if not isinstance(parallel, OwnStepReplicas):
        yield
        return
    parallel.alone = True
    try:
        yield
    finally:
        parallel.alone = False
