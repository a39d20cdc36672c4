"""Techniques as a user might write them, each wrong in one way."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from saturn_airflow.library import BaseTechnique
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.ranks import Ranks

LATER = 8  # steps, which are more than the guard takes


class Small(nn.Module):
    """A norm, a dropout, and a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.2)
        self.leave = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.leave(self.drop(self.norm(torch.tanh(self.enter(x)) * self.scale)))
        return found


def small() -> nn.Module:
    return Small()


class Tied(nn.Module):
    """A weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.other = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.leave = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.leave(torch.tanh(self.other(torch.tanh(self.one(self.enter(x))))))
        return found


def tied() -> nn.Module:
    return Tied()


def decays_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """The groups that most recipes have: biases and norms do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


class Counts(Parallel):
    """It knows how many steps were taken in this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self.steps += 1
        with torch.no_grad():
            self.after_step()

    def after_step(self) -> None:
        """Called where a step has been taken."""


class Averages(Counts):
    """It pulls weights towards an average of them, by little."""

    def after_step(self) -> None:
        own = list(self.trainable().values())
        if self.steps == 1:
            self.means = [p.clone() for p in own]
        for mean, p in zip(self.means, own, strict=True):
            mean.lerp_(p, 0.1)
            p.lerp_(mean, 1e-3)


class AveragesLater(Counts):
    """Some steps after it began it trains the average of the weights."""

    def after_step(self) -> None:
        own = list(self.trainable().values())
        if self.steps == 1:
            self.means = [p.clone() for p in own]
        for mean, p in zip(self.means, own, strict=True):
            mean.lerp_(p, 0.5)
            if self.steps >= LATER:
                p.copy_(mean)


class DecaysAll(Parallel):
    """What some groups are not to have, it gives to all."""

    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01


class OtherEpsilon(Parallel):
    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["eps"] = 1e-7


class StepsTheScheduleItself(Counts):
    """Some steps after it began it lets the learning rate fall with each micro-batch."""

    optimizer: torch.optim.Optimizer | None = None

    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def backward(self, *args: Any) -> Any:
        if self.steps >= LATER and self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
        return super().backward(*args)


class StepsTwice(Counts):
    """Some steps after it began it takes the optimizer's step once more."""

    optimizer: torch.optim.Optimizer | None = None

    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def drop_gradients(self) -> None:
        if self.steps >= LATER and self.optimizer is not None:
            self.optimizer.step()
        super().drop_gradients()


class ForgetsState(Parallel):
    """Where it begins, the optimizer begins."""

    began = False

    def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.began:
            optimizer.state.clear()
        self.began = True


class TrainsCopies(Parallel):
    """The optimizer has copies of the weights, as of a model that lies on another device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies = {name: nn.Parameter(p.detach().clone()) for name, p in super().trainable().items()}

    def trainable(self) -> dict[str, nn.Parameter]:
        return self.copies

    def finish_gradients(self) -> None:
        for name, p in super().trainable().items():
            self.copies[name].grad, p.grad = p.grad, None

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for name, p in super().trainable().items():
            p.data.copy_(self.copies[name].data)


class ComputesWithCopy(Counts):
    """It computes with a copy of the model, which gets the weights after each step."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(model, ranks, copy.deepcopy(model))

    def finish_gradients(self) -> None:
        for own, other in zip(self.model.parameters(), self.module.parameters(), strict=True):
            own.grad, other.grad = other.grad, None

    def after_step(self) -> None:
        for own, other in zip(self.model.parameters(), self.module.parameters(), strict=True):
            other.copy_(own)


class EvaluatesAsItTrains(Parallel):
    def evaluate(self, *args: Any) -> Any:
        self.module.train()
        return super().evaluate(*args)


class TrainsAsItEvaluates(Parallel):
    def backward(self, *args: Any) -> Any:
        self.module.eval()
        return super().backward(*args)


class StaysInEvaluation(Counts):
    """Once it has evaluated what it trained, it trains without dropout."""

    evaluated = False

    def evaluate(self, *args: Any) -> Any:
        self.evaluated = self.steps > 0
        return super().evaluate(*args)

    def backward(self, *args: Any) -> Any:
        self.module.train(not self.evaluated)
        return super().backward(*args)


class EvaluatesFirstWeights(Counts):
    """It evaluates a copy, which it makes when it is first asked to of what it trained."""

    first: nn.Module | None = None

    def evaluate(self, *args: Any) -> Any:
        if self.steps and self.first is None:
            self.first = copy.deepcopy(self.module)
        own, self.module = self.module, self.first or self.module
        try:
            return super().evaluate(*args)
        finally:
            self.module = own


class MovesFrozen(Counts):
    """It lets a weight decay that nobody trains, some steps after it began."""

    def after_step(self) -> None:
        if self.steps >= LATER:
            self.model.get_parameter("scale").mul_(0.999)


class MovesInBackward(Counts):
    """Some steps after it began it changes weights before the optimizer's step."""

    def finish_gradients(self) -> None:
        if self.steps >= LATER:
            self.model.get_parameter("leave.weight").data.mul_(0.999)


class DoublesGradients(Parallel):
    """It adds up over ranks what is to be a mean: as if there were two."""

    def finish_gradients(self) -> None:
        self.scale_gradients(2.0)


class ClipsEach(Parallel):
    """It clips each gradient by its own norm."""

    def clip_gradients(self, max_norm: float) -> None:
        for p in self.trainable().values():
            nn.utils.clip_grad_norm_([p], max_norm)


class Unties(Parallel):
    """Of a weight in two places it makes two."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        other = model.get_submodule("other")
        other.weight = nn.Parameter(other.get_parameter("weight").detach().clone())
        super().__init__(model, ranks)


class MovesBufferOfLastRank(Parallel):
    """On the last rank a buffer is another one after each step."""

    def finish_gradients(self) -> None:
        if self.ranks.rank == self.ranks.size - 1:
            self.model.get_buffer("extra.running_mean").add_(0.1)


class Right(Counts):
    """Nothing is wrong with it."""


def technique(kind: type[Parallel]) -> type[BaseTechnique]:
    """A technique that makes a model such a :class:`Parallel`."""

    class Made(BaseTechnique):
        def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> Parallel:
            return kind(model.to(ranks.device), ranks)

    return Made
