"""The plain loop for models with a training step of their own: one device, the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.guarding.bent_gradients import larger_backward
from saturn_airflow.training.guarding.counting import counts_of, grown
from saturn_airflow.training.guarding.plain import Step, stateful_of
from saturn_airflow.training.guarding.samples import Sample, Samples, Singles, buffers_of, samples, singles
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.optim.update_formats import noting_update_formats
from saturn_airflow.training.own_step import hooks, lightning
from saturn_airflow.training.own_step.user_step import OwnStep
from saturn_airflow.training.ranks import Ranks


class OwnPlainLoop:
    """Takes the steps of ``model``, which it changes, on its device."""

    def __init__(self, job: Job, model: nn.Module, device: torch.device, total_steps: int | None) -> None:
        alone = Parallel(model, Ranks(rank=0, size=1, device=device), optimizer_kernels="many at once")
        self._own = OwnStep(job, alone, total_steps)
        self._own.hold_schedulers()
        self._names = {p: name for name, p in model.named_parameters()}
        self._number = 0
        self._job = job
        self._counted_before: dict[str, float] = {}
        lightning.train_mode(model)

    @property
    def model(self) -> nn.Module:
        """That takes the steps."""
        return self._own.model

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The model's own."""
        return self._own.optimizers

    def step(self, parts: Sequence[MicroBatch]) -> Step:
        """Train on one batch, which is not cut."""
        (batch,) = parts
        model = self._own.model
        self._own.number = self._number
        if self._number == 0:
            self._counted_before = counts_of(self._job, model)
            hooks.call(model, "on_train_epoch_start")
        before = weights(self._names)
        seen = gradients_as_seen(self.optimizers, self._names)
        with seen as gradients, noting_update_formats(self.optimizers) as noted:
            taken = self._own.take(batch.data, self._number, schedule=False)
        self._number += 1
        after = weights(self._names)
        kept = stateful_of(self.optimizers, self._names)
        return Step(
            float(taken.loss),
            None,
            gradients,
            before,
            after,
            buffers_of(model),
            kept,
            grown(self._counted_before, counts_of(self._job, model)),
            update_format=noted.lowest,
        )

    def loss(self, batch: Any) -> tuple[torch.Tensor, None]:
        """The loss of a step that changes no weights."""
        with self._standing():
            return self._own.take(batch, self._number, schedule=False).loss, None

    def unclipped(self, batch: Any, scale: float) -> tuple[float, list[Samples]]:
        """The loss of a step, and what gradients of ``scale`` times as much are after each backward pass,
        over that; they are forgotten then."""
        found: list[Samples] = []
        trained = list(self._names)

        def see() -> None:
            found.append(samples({self._names[p]: p.grad for p in trained}))

        with self._standing(), larger_backward(trained, scale, see):
            taken = self._own.take(batch, self._number, schedule=False)
        return float(taken.loss.detach()), found

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """While it lasts, optimizers take no steps; gradients are as before afterwards."""
        before = [(p, p.grad) for p in self._names]
        with ExitStack() as put_back:
            for optimizer in self.optimizers:
                held = vars(optimizer)
                if "step" in held:
                    put_back.callback(held.__setitem__, "step", held["step"])
                else:
                    put_back.callback(held.pop, "step")
                held["step"] = _call_closure
            yield
        for parameter, gradient in before:
            parameter.grad = gradient

    def evaluate(self, batch: Any) -> float:
        """The loss of ``validation_step``."""
        model = self._own.model
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        with torch.no_grad():
            loss = float(self._own.evaluate(batch, 0).loss)
        for module, trained in modes:
            module.training = trained
        return loss


@contextmanager
def gradients_as_seen(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Any, str]
) -> Iterator[dict[str, Sample | None]]:
    """The gradients as each of ``optimizers`` saw them when it stepped last, by the parameters' names."""
    gradients: dict[str, Sample | None] = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        given = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        gradients.update(samples({names[p]: p.grad for p in given if p in names}))

    hooks = [optimizer.register_step_pre_hook(look) for optimizer in optimizers]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()


def _call_closure(closure: Callable[[], Any] | None = None, *_: Any, **__: Any) -> Any:
    return None if closure is None else closure()


def weights(names: Mapping[Any, str]) -> Singles:
    """Elements of the parameters."""
    return singles({name: p for p, name in names.items()})
