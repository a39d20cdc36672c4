"""Copies of what training changes, in host memory that is taken once: a checkpoint is written from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Tensors = dict[str, torch.Tensor]
# torch rounds what it pins up to powers of two. Most tensors share a slab of this size.
_SLAB = 2**28
# Bytes that tensors in a slab begin at multiples of, as torch's own allocator has it.
_ALIGNED = 256


class Staging:
    """Room for copies on the host, used anew for each checkpoint.

    :param pinned: in memory that a GPU copies to at full speed.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[torch.Tensor] = []

    def copies(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Copies of dense tensors, of sharded ones this rank's shard; valid until the next call."""
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in given.items()}
        places = self._places([_room(tensor) for tensor in local.values()])
        found: Tensors = {}
        devices = set()
        for (name, tensor), place in zip(local.items(), places, strict=True):
            copy = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=self._pinned)
            devices.add(tensor.device)
            found[name] = _with_layout_of(given[name], copy)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return found

    def _places(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Bytes of these sizes in the slabs, of which there are more afterwards if they did not suffice."""
        places, lengths = _laid_out(sizes, [len(slab) for slab in self._slabs])
        for length in lengths[len(self._slabs) :]:
            self._slabs.append(torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned))
        return [
            self._slabs[slab][start : start + size] for (slab, start), size in zip(places, sizes, strict=True)
        ]


def lie_on_device(tensors: Tensors) -> bool:
    """Whether most of ``tensors`` lie on a GPU. What lies in the host's memory already, as with spill and
    offload, would be there twice if it were copied."""
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[tensor.device.type] += tensor.numel() * tensor.element_size()
    return sizes["cuda"] >= sizes["cpu"]


def room_for(tensors: Tensors) -> int:
    """Bytes of the host's memory that :class:`Staging` takes for copies of ``tensors``."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    return sum(_laid_out([_room(tensor) for tensor in local], [])[1])


def _laid_out(sizes: Sequence[int], slabs: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where each of ``sizes`` lies, as the number of its slab and the first byte there, and the lengths of
    all slabs: of those there are, and of those to come."""
    places: list[tuple[int, int]] = []
    lengths = list(slabs)
    number, start = 0, 0
    for size in sizes:
        while number < len(lengths) and start + size > lengths[number]:
            number, start = number + 1, 0
        if number == len(lengths):
            lengths.append(max(_SLAB if sum(sizes) >= _SLAB else _ALIGNED, 1 << (size - 1).bit_length()))
        places.append((number, start))
        start += size
    return places, lengths


def own_part(tensors: Tensors, rank: int, everyones: Callable[[Any], list[Any]]) -> Tensors:
    """What of ``tensors`` this rank is to write, where what several ranks hold whole is written once."""
    held = everyones({name: t.nbytes for name, t in tensors.items() if not isinstance(t, DTensor)})
    load = [0] * len(held)
    left = dict(tensors)
    sizes = {name: size for part in held for name, size in part.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        writer = min((r for r, part in enumerate(held) if name in part), key=lambda r: (load[r], r))
        load[writer] += sizes[name]
        if writer != rank:
            left.pop(name, None)
    return left


def _room(tensor: torch.Tensor) -> int:
    return max(_ALIGNED, -(-tensor.nbytes // _ALIGNED) * _ALIGNED)


def _with_layout_of(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """A shard on the host that stands for the same part of the whole as that on the device."""
    if not isinstance(tensor, DTensor):
        return copy
    shard: torch.Tensor = DTensor(copy, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return shard
