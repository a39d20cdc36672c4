"""Optimizers as people bring them along, written as for plain PyTorch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch


class Invention(torch.optim.Optimizer):
    """Steps on each parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def trained(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad, self.state[parameter]


class Lamb(Invention):
    """Adam's step, as long as the whole parameter is (You et al. 2020)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient, state in self.trained():
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            state["step"] += 1
            state["mean"].lerp_(gradient, 0.1)
            state["square"].lerp_(gradient * gradient, 0.01)
            mean = state["mean"] / (1 - 0.9 ** state["step"])
            update = mean / ((state["square"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-6) + 0.01 * parameter
            length, by = parameter.norm(), update.norm()
            ratio = torch.where((length > 0) & (by > 0), length / by, torch.ones_like(by))
            parameter.sub_(group["lr"] * ratio * update)


class Lars(Invention):
    """Momentum, with a trust ratio for each parameter, as a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient, state in self.trained():
            trust = float(parameter.norm()) / (float(gradient.norm()) + 1e-9)
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            mean.mul_(0.9).add_(gradient, alpha=group["lr"] * trust)
            parameter.sub_(mean)


class Shampoo(Invention):
    """Preconditions matrices by the roots of what their rows and columns do (Gupta et al. 2018)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient, state in self.trained():
            flat = gradient.reshape(len(gradient), -1) if gradient.ndim else gradient.reshape(1, 1)
            if not state:
                state["rows"], state["columns"] = (
                    1e-3 * torch.eye(size, dtype=flat.dtype) for size in flat.shape
                )
            state["rows"] += flat @ flat.T
            state["columns"] += flat.T @ flat
            roots = [_root(state["rows"]), _root(state["columns"])]
            parameter.sub_(group["lr"] * (roots[0] @ flat @ roots[1]).reshape(parameter.shape))


def _root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class Lion(Invention):
    """Steps by the signs of a momentum (Chen et al. 2023)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient, state in self.trained():
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            parameter.mul_(1 - 0.1 * group["lr"])
            parameter.sub_(group["lr"] * (0.9 * mean + 0.1 * gradient).sign())
            mean.lerp_(gradient, 0.01)


class Sophia(Invention):
    """Clips the steps by an estimate of the curvature that it renews every second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient, state in self.trained():
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter), curve=torch.zeros_like(parameter))
            if state["step"] % 2 == 0:
                state["curve"].lerp_(gradient * gradient, 0.1)
            state["step"] += 1
            state["mean"].lerp_(gradient, 0.1)
            parameter.sub_(group["lr"] * (state["mean"] / (state["curve"] + 1e-3)).clamp(-1, 1))


class EightBit(Invention):
    """Keeps its momentum in blocks of 8-bit numbers, with a scale for each."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient, state in self.trained():
            mean = torch.zeros_like(parameter)
            if state:
                blocks = state["numbers"].to(parameter.dtype) * state["scales"][:, None]
                mean = blocks.flatten()[: parameter.numel()].reshape(parameter.shape)
            mean = 0.9 * mean + 0.1 * gradient
            blocks = torch.nn.functional.pad(mean.flatten(), (0, -mean.numel() % 64)).reshape(-1, 64)
            state["scales"] = (blocks.abs().amax(1) / 127).clamp(min=1e-12)
            state["numbers"] = (blocks / state["scales"][:, None]).round().to(torch.int8)
            parameter.sub_(group["lr"] * mean)


class Lookahead(Invention):
    """Goes half of the way back to slow weights every second step, which it keeps with the others' state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, gradient, state in self.trained():
            if not state:
                state.update(slow=parameter.clone(), steps=0)
            parameter.sub_(group["lr"] * gradient)
            state["steps"] += 1
            if state["steps"] % 2 == 0:
                state["slow"].lerp_(parameter, 0.5)
                parameter.copy_(state["slow"])


class LooksAhead(torch.optim.Optimizer):
    """The same around another optimizer, as wrappers from the web do it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        self.optimizer = torch.optim.SGD(params, lr, momentum=0.9)
        super().__init__(self.optimizer.param_groups, {"lr": lr})
        self.param_groups = self.optimizer.param_groups
        self.slow: dict[Any, Any] = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            for parameter in group["params"] if group["counter"] % 2 == 0 else ():
                slow = self.slow[parameter].setdefault("slow", parameter.detach().clone())
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class CountsAll(Invention):
    """One number for all parameters, on the object: its rate falls with the steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.steps_done = 0
        self.sizes: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps_done += 1
        self.sizes.append(1.0 / self.steps_done)
        for group, parameter, gradient, _ in self.trained():
            parameter.sub_(group["lr"] * sum(self.sizes) / self.steps_done * gradient)


class FollowsLength(Invention):
    """One tensor for all parameters, on the object: a mean of how long all gradients are."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.length = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = torch.stack([gradient.norm() for _, _, gradient, _ in self.trained()]).norm()
        self.length = self.length.lerp(total.double(), 0.5)
        for group, parameter, gradient, _ in self.trained():
            parameter.sub_(group["lr"] / (1 + self.length.to(parameter.dtype)) * gradient)


class KeepsLists(Invention):
    """Momenta in a list on the object, in the order of the parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.momenta = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [(group, p) for group in self.param_groups for p in group["params"]]
        for (group, parameter), momentum in zip(parameters, self.momenta, strict=True):
            if parameter.grad is not None:
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * momentum)


class ScheduleFree(Invention):
    """Gradients are taken between a fast sequence and its mean, which is what is evaluated (Defazio 2024)."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, step_number=0, train_mode=True)

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True, 0.1)

    def _switch(self, mode: bool, by: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != mode else ():
                if "fast" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["fast"], by)
            group["train_mode"] = mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "call optimizer.train() first"
            group["step_number"] += 1
        for group, parameter, gradient, state in self.trained():
            fast, share = state.setdefault("fast", parameter.clone()), 1 / group["step_number"]
            parameter.lerp_(fast, share)
            parameter.add_(gradient, alpha=group["lr"] * (0.9 * (1 - share) - 1))
            fast.sub_(group["lr"] * gradient)


class Sam(Invention):
    """Looks at the gradient a little uphill first (Foret et al. 2021), for which it calls the closure."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "Sam needs a closure"
