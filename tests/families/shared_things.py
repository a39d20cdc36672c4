"""State that is not the dataset's own: generators and counters of Python modules, what data and model share.

Three epochs of two batches, of 5 samples and 1; what is resumed goes on at the second epoch.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, WeightedRandomSampler

from families import data
from families.family import Family, register
from families.plain import stack
from families.remembering_data import SAMPLES, Vectors

KIND = "state beside the data"

NUMPY = np.random.default_rng(11)
TORCH = torch.Generator().manual_seed(12)
PYTHON = random.Random(13)
NUMBERS = itertools.count()
SEEN: list[int] = []
CALLS = 0


def fresh() -> None:
    """What a new process would have."""
    global NUMPY, TORCH, PYTHON, NUMBERS, CALLS
    NUMPY, TORCH, PYTHON = np.random.default_rng(11), torch.Generator().manual_seed(12), random.Random(13)
    NUMBERS, CALLS = itertools.count(), 0
    SEEN.clear()
    ByClass.calls = 0
    Curriculum.passes = 0


class FromNumpy(Vectors):
    def factor(self) -> float:
        return float(NUMPY.normal())


class FromTorch(Vectors):
    def factor(self) -> float:
        return float(torch.randn((), generator=TORCH))


class FromPython(Vectors):
    def factor(self) -> float:
        return PYTHON.random()


class FromCounter(Vectors):
    def factor(self) -> float:
        return 1 + next(NUMBERS) / 10


class FromNumber(Vectors):
    def factor(self) -> float:
        global CALLS
        CALLS += 1
        return 1 + CALLS / 10


class FromList(Vectors):
    def factor(self) -> float:
        SEEN.append(1)
        return 1 + len(SEEN) / 10


class ByClass(Vectors):
    """Counts in its class."""

    calls = 0

    def factor(self) -> float:
        ByClass.calls += 1
        return 1 + ByClass.calls / 10


def mixup(rows: list[Any]) -> Any:
    """Mixes samples by a generator of the module."""
    x, y = (torch.stack([torch.as_tensor(row[part]) for row in rows]) for part in (0, 1))
    share = NUMPY.beta(2.0, 2.0)
    order = torch.as_tensor(NUMPY.permutation(len(rows)))
    return share * x + (1 - share) * x[order], y


def sampled() -> Any:
    fresh()
    return DataLoader(
        Vectors(), data.BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=TORCH)
    )


class Noisy(nn.Module):
    """Adds noise by a generator of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + 0.1 * torch.randn(x.shape, generator=TORCH, dtype=x.dtype)
        return self.body(x)


class Curriculum(nn.Module):
    """Counts its passes in its class."""

    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            Curriculum.passes += 1
        return self.body(x) * (1 + Curriculum.passes / 10)


def negatives_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Against a class drawn by a generator of the module."""
    others = torch.as_tensor(NUMPY.integers(0, 4, len(targets)))
    rows = torch.arange(len(targets))
    return functional.softplus(outputs[rows, others] - outputs[rows, targets]).mean()


def fewer_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Weighed by a number that it changes."""
    global CALLS
    CALLS += 1
    return functional.cross_entropy(outputs, targets) / CALLS


def loader_of(kind: type[Vectors], **options: Any) -> Callable[[], Any]:
    def load() -> Any:
        fresh()
        return DataLoader(kind(), data.BATCH, **options)

    return load


LOADERS: dict[str, Callable[[], Any]] = {
    "a module's numpy generator": loader_of(FromNumpy),
    "a module's torch generator": loader_of(FromTorch),
    "a module's random.Random": loader_of(FromPython),
    "a module's itertools.count": loader_of(FromCounter),
    "a module's number": loader_of(FromNumber),
    "a module's list": loader_of(FromList),
    "a class's number": loader_of(ByClass),
    "collating by a module's generator": loader_of(Vectors, collate_fn=mixup),
    "a sampler by a module's generator": sampled,
}
register(
    *(
        Family(name, KIND, stack, loader, "families.plain:class_loss", recipe={"epochs": 3})
        for name, loader in LOADERS.items()
    ),
    Family(
        "a model that draws by a module's generator",
        KIND,
        Noisy,
        loader_of(Vectors),
        "families.plain:class_loss",
        couples=True,  # it draws for each micro-batch
        recipe={"epochs": 3},
    ),
    *(
        Family(name, KIND, model, loader_of(Vectors), loss, recipe={"epochs": 3})
        for name, model, loss in (
            ("a model that counts in its class", Curriculum, "families.plain:class_loss"),
            ("a loss that draws by a module's generator", stack, "families.shared_things:negatives_loss"),
            ("a loss that counts in its module", stack, "families.shared_things:fewer_loss"),
        )
    ),
)
