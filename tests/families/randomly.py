"""Small models of plain torch put together by chance, from a description that fits in JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from families import data
from families.family import Family

WIDTH, CLASSES = 6, 3

#: What a block can be made of; each can be got wrong in another way.
SORTS = (
    "linear",
    "layer norm",
    "batch norm",
    "returns a pair",
    "scalar",
    "unused parameter",
    "counts calls",
    "routed",
    "skipped by sign",
    "weight norm",
    "recurrent",
)

descriptions = st.fixed_dictionaries(
    {
        "blocks": st.lists(st.sampled_from(SORTS), min_size=2, max_size=4),
        "alike": st.booleans(),
        "shared": st.booleans(),
        "frozen": st.sampled_from(["nothing", "first", "blocks", "biases"]),
        "holder": st.sampled_from(["list", "sequential", "attributes"]),
        "sizes": st.sampled_from([[4, 4], [5, 3], [5, 1], [2, 2]]),
        "loss": st.sampled_from(["mean", "sum and count", "counted", "contrast", "squared mean", "sum"]),
        "optimizer": st.sampled_from(["torch.optim:SGD", "torch.optim:AdamW", "torch.optim:Adagrad"]),
    }
)


class Piece(nn.Module):
    """One block of a random model."""

    def __init__(self, sort: str) -> None:
        super().__init__()
        self.sort = sort
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        if sort == "layer norm":
            self.norm: nn.Module = nn.LayerNorm(WIDTH)
        if sort == "batch norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if sort == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.7))
        if sort == "unused parameter":
            self.spare = nn.Linear(WIDTH, 2)
        if sort == "counts calls":
            self.register_buffer("seen", torch.zeros(()))
        if sort == "routed":
            self.other = nn.Linear(WIDTH, WIDTH)
        if sort == "weight norm":
            nn.utils.parametrizations.weight_norm(self.up)
        if sort == "recurrent":
            self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x) if hasattr(self, "norm") else x
        y = self.down(torch.tanh(self.up(y)))
        if self.sort == "scalar":
            y = self.scale * y
        if self.sort == "counts calls" and self.training:
            self.seen.add_(1)
        if self.sort == "counts calls":
            y = y * (1 + 0.1 * self.seen)
        if self.sort == "routed":
            rows = (x[:, 0] > 0).nonzero().flatten()
            y = y.index_add(0, rows, self.other(x[rows])) if len(rows) else y
        if self.sort == "skipped by sign" and x.sum() < 0:
            return x
        if self.sort == "recurrent":
            return self.cell(y, x)
        return (x + y, y) if self.sort == "returns a pair" else x + y


class Random(nn.Module):
    """A layer, blocks, a layer."""

    def __init__(self, description: dict[str, Any]) -> None:
        super().__init__()
        sorts = description["blocks"]
        if description["alike"]:
            sorts = [sorts[0]] * len(sorts)
        blocks = [Piece(sort) for sort in sorts]
        if description["shared"]:
            blocks[-1].up.weight = (
                blocks[0].up.weight if sorts[-1] != "weight norm" != sorts[0] else blocks[-1].up.weight
            )
        self.first = nn.Linear(WIDTH, WIDTH)
        self.holder = description["holder"]
        if self.holder == "attributes":
            for number, block in enumerate(blocks):
                self.add_module(f"block{number}", block)
        else:
            in_list = self.holder == "list" or "returns a pair" in sorts
            self.blocks = nn.ModuleList(blocks) if in_list else nn.Sequential(*blocks)
        self.count = len(blocks)
        self.last = nn.Linear(WIDTH, CLASSES)
        self._freeze(description["frozen"])

    def _freeze(self, what: str) -> None:
        for name, parameter in self.named_parameters():
            kept = {
                "nothing": True,
                "first": not name.startswith("first"),
                "blocks": not name.startswith("block"),
                "biases": not name.endswith("bias"),
            }[what]
            parameter.requires_grad_(kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for number in range(self.count):
            x = (getattr(self, f"block{number}") if self.holder == "attributes" else self.blocks[number])(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.last(x)


def family(name: str) -> Family:
    """The family that ``name``, JSON, describes."""
    description = json.loads(name)
    return Family(
        name,
        "random",
        lambda: Random(description),
        lambda: batches(description),
        f"families.randomly:{LOSSES[description['loss']]}",
        couples=description["loss"] in COUPLING or "batch norm" in description["blocks"],
    )


def batches(description: dict[str, Any]) -> Any:
    """Two batches of the sizes described: the first tells the batch size, the second what is left."""
    size, left = description["sizes"]

    def row(number: int, generator: torch.Generator) -> Any:
        return torch.randn(WIDTH, generator=generator), torch.randint(0, CLASSES, (), generator=generator)

    return data.loader(row, size + left, size)


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets)


def sum_and_count(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return cross_entropy(outputs, targets, reduction="sum"), len(targets)


def counted(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over those samples alone that are not of class 0; one always counts, so that there is something."""
    kept = targets > 0
    return (cross_entropy(outputs, targets, reduction="none") * kept).sum(), kept.sum()


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def squared_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean(0).square().sum()


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A sum, where a mean is asked for."""
    return cross_entropy(outputs, targets, reduction="sum")


COUPLING = ("contrast", "squared mean", "sum")
LOSSES = {
    "mean": "mean",
    "sum and count": "sum_and_count",
    "counted": "counted",
    "contrast": "contrast",
    "squared mean": "squared_mean",
    "sum": "total",
}
