"""Optimizers whose step on a parameter depends on more than what a device may have of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Coupling(torch.optim.SGD):
    """Changes gradients before it steps on them."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        """Change them; whether there is a step at all."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.change([p for group in self.param_groups for p in group["params"] if p.grad is not None]):
            super().step()


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What this device has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ClipsLarge(Coupling):
    """Clips by the norm of all gradients, where that is very large."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        nn.utils.clip_grad_norm_(parameters, 1e5)
        return True


class EnlargesSmall(Coupling):
    """Has the gradients be of length 1 where all together are very small."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        norm = torch.stack([gradient_of(p).norm() for p in parameters]).norm()
        if norm < 1e-4:
            for p in parameters:
                gradient_of(p).div_(norm)
        return True


class SkipsLarge(Coupling):
    """Takes no step where a number is too large."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        return all(bool(gradient_of(p).abs().max() < 1e4) for p in parameters)


class SkipsNaN(Coupling):
    """Takes no step where something is no number, as loss scaling does."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        return not any(bool(gradient_of(p).isnan().any()) for p in parameters)


class ReadsNeighbours(Coupling):
    """Divides each gradient by the length of the next one."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        norms = [gradient_of(p).norm() for p in parameters]
        for p, norm in zip(parameters, norms[1:] + norms[:1], strict=True):
            gradient_of(p).div_(1 + norm)
        return True


class ByPlace(Coupling):
    """Its rate falls from one parameter to the next."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        for number, p in enumerate(parameters):
            gradient_of(p).mul_(0.9**number)
        return True


class ByNumber(Coupling):
    """Its rate follows from how many parameters there are."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        for p in parameters:
            gradient_of(p).div_(len(parameters))
        return True


class SharesState(Coupling):
    """Keeps a mean of how large gradients are, for the parameters of all groups."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        state = self.state["all"]  # type: ignore[index]
        for p in parameters:
            state["mean"] = 0.9 * state.get("mean", 0.0) + float(gradient_of(p).abs().mean())
        for p in parameters:
            gradient_of(p).div_(1 + state["mean"])
        return True


class ByWeights(Coupling):
    """Its rate follows from how long all weights are."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        norm = torch.stack([p.norm() for p in parameters]).norm()
        for p in parameters:
            gradient_of(p).mul_(norm)
        return True


class ByShape(Coupling):
    """Its rate follows from the shape of a matrix; vectors it steps on by signs."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        for p in parameters:
            if p.ndim > 1:
                gradient_of(p).mul_(max(1, p.shape[0] / p.shape[1]) ** 0.5)
            else:
                gradient_of(p).sign_()
        return True


class ClipsLargeHere(Coupling):
    """Clips what this device has of each gradient, where that is very large."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        for p in parameters:
            part = here(gradient_of(p))
            part.mul_(torch.clamp(1e5 / part.norm(), max=1.0))
        return True


class SkipsNaNHere(Coupling):
    """Leaves a parameter alone where something of what this device has of its gradient is no number."""

    def change(self, parameters: list[nn.Parameter]) -> bool:
        for p in parameters:
            part = here(gradient_of(p))
            if part.isnan().any():
                part.zero_()
        return True


class CountsOnClass(torch.optim.SGD):
    """Its rate falls with a counter of its class, which each new one begins anew."""

    steps = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        CountsOnClass.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        CountsOnClass.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(gradient_of(p), alpha=-group["lr"] / CountsOnClass.steps)
