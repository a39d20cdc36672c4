"""Optimizers that keep something where a checkpoint finds it, and that do not."""

from __future__ import annotations

import itertools
from typing import Any

import torch


class Weakens(torch.optim.SGD):
    """Its steps become smaller, by a count that it keeps where it says."""

    def counted(self) -> int:
        state: dict[str, int] = self.state["all"]  # type: ignore[index]
        state["count"] = state.get("count", 0) + 1
        return state["count"]

    def step(self, closure: Any = None) -> Any:
        count = self.counted()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(count)
        return super().step(closure)


class CountsInClass(Weakens):
    count = 0

    def counted(self) -> int:
        CountsInClass.count += 1
        return CountsInClass.count


class CountsInClosure(Weakens):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        counts = itertools.count(1)
        self.note = lambda: next(counts)

    def counted(self) -> int:
        count: int = self.note()  # type: ignore[no-untyped-call]
        return count


class CountsUnderNames(Weakens):
    """As of no parameter in particular: a number, and a tensor."""

    def counted(self) -> int:
        state: dict[Any, Any] = self.state
        state["count"] = state.get("count", 0) + 1
        state.setdefault("tensor", torch.zeros(1)).add_(1)
        return int((state["count"] + state["tensor"].item()) / 2)


@torch.compile(fullgraph=True, backend="eager")
def _stepped(parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> torch.Tensor:
    return parameter - rate * gradient


class CompilesItsStep(torch.optim.Optimizer):
    """As torchao's do: what is compiled may not be computed uncompiled."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(_stepped(parameter, parameter.grad, group["lr"]))


class CantBeLoaded(Weakens):
    def load_state_dict(self, state_dict: Any) -> None:
        raise RuntimeError("not by me")


class KeepsObjects(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = object()
        return super().step(closure)


class AddsNoise(torch.optim.SGD):
    """Langevin dynamics: noise on all weights after each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


class KeepsLists(torch.optim.SGD):
    """It takes steps along the last two gradients, which it keeps in a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                last = [*self.state[parameter].get("last", []), parameter.grad.clone()][-2:]
                self.state[parameter]["last"] = last
                parameter.add_(sum(last), alpha=-group["lr"])


class KeepsNorms(torch.optim.SGD):
    """It keeps a number of each parameter that was computed from its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["norm"] = parameter.grad.sum() * 0 + 1
                parameter.add_(parameter.grad, alpha=-group["lr"])


class ClipsInAHook(torch.optim.SGD):
    """It clips gradients in a hook of its own, before each of its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_step_pre_hook(clip)


class ClampsInAHook(torch.optim.SGD):
    """After each of its steps it keeps weights small, and it warms up before; its class is called, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_step_pre_hook(warm_up)
        self.register_step_post_hook(clamp)

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def warm_up(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = min(0.95, group["momentum"] + 1e-3)


def clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-1, 1)


def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_value_(group["params"], 1e-3)
