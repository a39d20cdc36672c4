"""A plain loop that knows nothing of Saturn: what odd jobs are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Losses = dict[int, float]


def train_plainly(
    model: nn.Module,
    data: Iterable[Any],
    loss_function: Callable[[Any, Any], torch.Tensor],
    make_optimizer: Callable[..., torch.optim.Optimizer],
    steps: int,
    lr: float = 1e-2,
    clip: float | None = None,
    **optimizer_args: Any,
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Losses by step and weights at the end, of ``steps`` steps in float64 over the data, again and again."""
    model = model.double().train()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], lr=lr, **optimizer_args)
    losses: Losses = {}
    while len(losses) < steps:
        for batch in data:
            if isinstance(batch, dict):
                loss = loss_function(model(**{k: v for k, v in batch.items() if k != "labels"}), batch)
            else:
                inputs, targets = batch
                loss = loss_function(
                    model(inputs.double() if inputs.is_floating_point() else inputs), targets
                )
            loss.backward()
            if clip is not None:
                clip_gradients(model, clip)
            optimizer.step()
            optimizer.zero_grad()
            losses[len(losses) + 1] = loss.item()
            if len(losses) == steps:
                break
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def clip_gradients(model: nn.Module, most: float) -> None:
    """What torch's ``clip_grad_norm_`` does, which takes no sparse gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.to_dense().square().sum() for g in gradients]).sum().sqrt()
    for gradient in gradients:
        gradient.mul_((most / (norm + 1e-6)).clamp(max=1.0))
