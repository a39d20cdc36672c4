"""What a family is: a small model, its data and its loss, as someone would write them without Saturn."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

#: The modules of families, in the order of the table.
ROOMS = (
    *("decoders", "encoders", "seq2seq", "images", "speech", "several"),
    *("plain", "oddities", "unseen", "uncommon", "everyday", "remembering_data", "shared_things", "composed"),
    *("practice", "tasks", "newer", "hybrids", "mechanisms"),
    *("research", "architectures", "batch_kinds", "counting_code", "recent"),
)


@dataclass(frozen=True)
class Family:
    """One family of models.

    :param kind: what sort of model it is, as the table groups them.
    :param model: makes the model; the same one each time, whatever the generators' state.
    :param data: makes the batches, in the same order each time: global batches as the plain loop sees them.
    :param loss: ``"module:name"`` of a function of outputs and batch; without it the model's own ``loss``.
    :param couples: whether the loss or the state of the whole batch is another than that of its parts, so
        that accumulation is part of the job's maths (BatchNorm, contrastive losses).
    :param ignored: the label that the loss leaves out; where it is a mean over labels, parts count by the
        others.
    :param single_precision: whether the model or its loss computes in float32 whatever its weights are in.
    :param random: whether the forward pass draws random numbers.
    :param recipe: how it is trained, where that is not as the others are.
    :param job: what else Saturn is told of it.
    """

    name: str
    kind: str
    model: Callable[[], nn.Module]
    data: Callable[[], Iterable[Any]]
    loss: str | None = None
    couples: bool = False
    ignored: int = -100
    single_precision: bool = False
    random: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)


_families: dict[str, Family] = {}


def register(*families: Family) -> None:
    """Take families into the matrix."""
    for family in families:
        assert family.name not in _families, family.name
        _families[family.name] = family


def families() -> dict[str, Family]:
    """All families by name."""
    for room in ROOMS:
        importlib.import_module(f"families.{room}")
    return _families


def find(name: str) -> Family:
    """The family of that name, or the random one that it describes in JSON."""
    if name.startswith("{"):
        found: Family = importlib.import_module("families.randomly").family(name)
        return found
    return families()[name]


def model(family: str) -> nn.Module:
    """The model of a family, made from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return find(family).model()


def data(family: str) -> Iterable[Any]:
    """The batches of a family."""
    return find(family).data()
