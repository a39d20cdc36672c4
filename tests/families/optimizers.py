"""Optimizers of one's own, and parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class CountsInGroups(torch.optim.Optimizer):
    """Keeps the number of steps in the group, as many optimizers outside of torch do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["step"])


class KeepsHistory(torch.optim.Optimizer):
    """Keeps a mean of gradients and, as a number, how large it is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["steps"] = torch.zeros_like(parameter), 0
                state["steps"] += 1
                state["mean"].lerp_(parameter.grad, 1 / state["steps"])
                parameter.add_(state["mean"], alpha=-group["lr"])


def matrices(model: nn.Module) -> list[dict[str, Any]]:
    """What Muon can train: matrices."""
    return [{"params": [p for p in model.parameters() if p.requires_grad and p.ndim == 2]}]
