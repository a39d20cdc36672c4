"""The unusual models by their names: each module that has some enters them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from odd import Block
from torch import nn

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


DEPTH = 4


MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(name: str) -> nn.Module:
    """One of these models, of a seed, with a plan for tensor parallelism."""
    torch.manual_seed(0)
    made = MODELS[name]()
    made.tp_plan = PLAN  # type: ignore[assignment]
    return made


def blocks() -> list[nn.Module]:
    return [Block(8) for _ in range(DEPTH)]


def unusual(name: str) -> Callable[[Any], Any]:
    """Enter a model, by its class or by a function that makes it."""

    def enter(made: Any) -> Any:
        MODELS[name] = (lambda: made(blocks())) if isinstance(made, type) else made
        return made

    return enter
