"""A few numbers of each tensor, of the part that this rank has: what is looked at around a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_PICKED = 64  # numbers of each tensor


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie here one after the other, and are no whole numbers."""
    part = part_here(tensor)
    known = type(part) in (torch.Tensor, nn.Parameter) and part.layout == torch.strided
    return known and part.numel() > 0 and (part.is_floating_point() or part.is_complex())


def some_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of some numbers of a plain tensor."""
    part = part_here(tensor).detach()
    if not part.ndim:
        return part.clone()
    flat = part.reshape(-1)
    return flat[:: max(1, flat.numel() // _PICKED)][:_PICKED].clone()


def numbers_of(columns: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Each column's tensors as vectors in float64 on the CPU, which is waited for once a device."""
    told = []
    for tensors in columns:
        flat = [(torch.view_as_real(t) if t.is_complex() else t).reshape(-1).double() for t in tensors]
        by_device = defaultdict[torch.device, list[int]](list)
        for number, tensor in enumerate(flat):
            by_device[tensor.device].append(number)
        for numbers in by_device.values():
            lengths = [flat[number].numel() for number in numbers]
            here = torch.cat([flat[number] for number in numbers]).cpu()
            for number, part in zip(numbers, torch.split(here, lengths), strict=True):
                flat[number] = part
        told.append(flat)
    return told
