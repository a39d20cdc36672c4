"""Plain loops over models with training steps of their own: the model, and the loss of each step."""

from __future__ import annotations

from typing import Any

import torch
from own_step_jobs import EMA, GAN, Accumulating, Distillation, MoCo, rows
from torch import nn
from torch.nn import functional


def gan(epochs: int) -> tuple[nn.Module, list[float]]:
    model, losses = GAN(), []
    model.configure_optimizers()
    for _ in range(epochs):
        losses += [float(model.training_step(batch, i)["loss"]) for i, batch in enumerate(rows())]
    return model, losses


def distillation(epochs: int) -> tuple[nn.Module, list[float]]:
    model, losses = Distillation(), []
    optimizer = torch.optim.AdamW(model.student.parameters(), 1e-2)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5**epoch
        for batch in rows():
            loss = model.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return model, losses


def ema(epochs: int) -> tuple[nn.Module, list[float]]:
    model, losses = EMA(), []
    optimizer = torch.optim.Adam(model.student.parameters(), 1e-2)
    average = [p.clone() for p in model.average.parameters()]
    moves = 0
    for _ in range(epochs):
        for x, y in rows():
            hidden = torch.tanh(functional.linear(x, average[0], average[1]))
            target = functional.linear(hidden, average[2], average[3])
            loss = functional.mse_loss(model.student(x), y + target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            moves += 1
            decay = min(0.9, moves / (10 + moves))
            with torch.no_grad():
                for mean, new in zip(average, model.student.parameters(), strict=True):
                    mean.copy_(decay * mean + (1 - decay) * new)
            losses.append(float(loss))
    with torch.no_grad():
        for parameter, mean in zip(model.average.parameters(), average, strict=True):
            parameter.copy_(mean)
    return model, losses


def moco(epochs: int) -> tuple[nn.Module, list[float]]:
    model, losses = MoCo(), []
    described = model.configure_optimizers()
    for _ in range(epochs):
        for i, batch in enumerate(rows()):
            loss = model.training_step(batch, i)
            described["optimizer"].zero_grad()
            loss.backward()
            described["optimizer"].step()
            described["lr_scheduler"]["scheduler"].step()
            losses.append(float(loss))
    return model, losses


def accumulating(epochs: int) -> tuple[nn.Module, list[float]]:
    model, losses = Accumulating(), []
    model.configure_optimizers()
    for _ in range(epochs):
        losses += [float(model.training_step(batch, i)["loss"]) for i, batch in enumerate(rows())]
    return model, losses


def by_itself(model: Any, epochs: int) -> tuple[nn.Module, list[float]]:
    losses: list[float] = []
    model.configure_optimizers()
    for _ in range(epochs):
        losses += [float(model.training_step(batch, i)) for i, batch in enumerate(rows())]
    return model, losses
