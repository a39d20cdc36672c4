"""Numbers that a model and the job's code keep, such as how many samples or batches they have seen.

What follows from them may begin long after the steps that are compared, so they are compared themselves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from saturn_airflow.model.jobs import Job
from saturn_airflow.training.optim import own_classes
from saturn_airflow.training.used_modules import python_modules

_LOOKED_AT, _DEEP = 64, 3  # items of a container, and containers and objects within each other


def counts_of(job: Job, model: nn.Module) -> dict[str, float]:
    """The numbers that modules keep as attributes, and the job's code as global variables and
    attributes of classes, also in containers and objects there, by where they are."""
    found: dict[str, float] = {}
    for prefix, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in _OF_TORCH:
                found.update(_within(f"{prefix}.{key}" if prefix else key, value, _DEEP))
    for name in sorted(python_modules(job, model)):
        for key, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, type) and value.__module__ == name:
                for of_class, part in list(vars(value).items()):
                    found.update(_within(f"{name}.{key}.{of_class}", part, _DEEP))
            elif not key.startswith("__"):
                found.update(_within(f"{name}.{key}", value, _DEEP))
    return found


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """By how much the counts of ``now`` are larger than ``before``."""
    return {name: count - before.get(name, 0) for name, count in now.items()}


_OF_TORCH = frozenset(vars(nn.Module()))


def _within(name: str, value: Any, deep: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    elif type(value) in (torch.Tensor, np.ndarray) and math.prod(value.shape) == 1:
        value = None if getattr(value, "is_meta", False) else value.item()
    # To isinstance, True and False are whole numbers, too.
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        yield name, value
    elif deep:
        parts: Mapping[Any, Any] = own_classes.fields_of(value) or {}
        if type(value) is SimpleNamespace:
            parts = vars(value)
        elif isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = dict(items) if len(value) <= _LOOKED_AT else {}
        for key, part in list(parts.items()):
            yield from _within(f"{name}.{key}", part, deep - 1)
