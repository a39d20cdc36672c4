"""A few numbers of each tensor that tell whether two tensors are the same, wherever their parts are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from saturn_airflow.training.guarding.gathering import dense

_WHOLE = 1024  # tensors of up to this many elements are kept whole
# Of larger ones so many elements, and so many blocks whose sums are kept.
_PICKED, _BLOCKS = 512, 64


@dataclass(frozen=True)
class Sample:
    """What is kept of a tensor.

    :param values: single elements, then scaled sums over stretches, in float64 on the CPU; all elements of a
        small tensor.
    :param singles: how many of the first values are elements.
    :param norm: the L2 norm of the whole tensor, and
    :param count: how many elements it has.
    :param share: of the squared norm that ``values`` are expected to have.
    :param exact: whether the tensor holds whole numbers.
    """

    values: torch.Tensor
    singles: int
    norm: float
    count: int
    share: float
    exact: bool

    def distance(self, other: Sample) -> float:
        """How far the whole tensors are apart, in the L2 norm, as their samples tell."""
        if self.values.shape != other.values.shape:
            return math.inf
        return float((self.values - other.values).norm()) / math.sqrt(self.share or 1.0)


Samples = Mapping[str, Sample | None]
Singles = Mapping[str, torch.Tensor]


def samples(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Sample | None]:
    """The samples of ``tensors``; where some are sharded every rank must ask together."""
    there = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    found = dict(zip(there, map(_sample, dense(there.values())), strict=True))
    return {name: found.get(name) for name in tensors}


def buffers_of(model: nn.Module, aliases: Mapping[str, str] | None = None) -> dict[str, Sample | None]:
    """The samples of a model's buffers, of those that checkpoints have.

    :param aliases: the first names of those that have several.
    """
    kept, first = model.state_dict(keep_vars=True), aliases or {}
    return samples({first.get(name, name): b for name, b in model.named_buffers() if name in kept})


def singles(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The elements of ``tensors`` that their samples have; where some are sharded every rank must ask
    together."""
    found = map(_singles, dense(tensor.detach() for tensor in tensors.values()))
    return dict(zip(tensors, found, strict=True))


def _sample(tensor: torch.Tensor) -> Sample:
    flat = _flat(tensor)
    exact = not flat.is_floating_point()
    norm = float(torch.linalg.vector_norm(flat.double() if exact else flat, dtype=torch.float64))
    count = flat.numel()
    if count <= _WHOLE:
        return Sample(_copied(flat), count, norm, count, 1.0, exact)
    picked = _picked(flat)
    length = count // _BLOCKS
    # Over the root of its length, the error of a sum is expected to be as large as that of an element, where
    # those of elements are independent.
    sums = flat[: length * _BLOCKS].view(_BLOCKS, length).sum(1, dtype=torch.float64) / math.sqrt(length)
    values = torch.cat([picked, sums.cpu()])
    return Sample(values, len(picked), norm, count, len(values) / count, exact)


def _singles(tensor: torch.Tensor) -> torch.Tensor:
    flat = _flat(tensor)
    return _copied(flat) if flat.numel() <= _WHOLE else _picked(flat)


def _picked(flat: torch.Tensor) -> torch.Tensor:
    return _copied(flat[:: flat.numel() // _PICKED][:_PICKED])


def _copied(values: torch.Tensor) -> torch.Tensor:
    return values.to("cpu", torch.float64, copy=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
