"""Copies of what training changes, in host memory that is taken once: a checkpoint is written from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from saturn_airflow.parallelism.transfers import Transfers, on

Tensors = dict[str, torch.Tensor]
# torch rounds what it pins up to powers of two. Most tensors share a slab of this size.
_SLAB = 2**28
# Bytes that tensors in a slab begin at multiples of, as torch's own allocator has it.
_ALIGNED = 256


class Staging:
    """Room for copies on the host, used anew for each checkpoint.

    On a GPU copies are under way beside what is computed, into pinned memory.

    :param device: where most of what is copied lies.
    :param transfers: the ways to the host; None for those that the device has.
    """

    def __init__(self, device: torch.device, transfers: Transfers | None = None) -> None:
        self._device = device
        self._given = transfers
        self._slabs: list[torch.Tensor] = []
        self._ticket: Any = None
        # What is copied, and the sums of what it is copied from.
        self._copied: list[tuple[str, torch.Tensor]] = []
        self._sums: torch.Tensor | None = None

    @property
    def _transfers(self) -> Transfers:
        self._given = self._given or on(self._device)  # not before there is something to copy
        return self._given

    @torch.no_grad()
    def copies(self, tensors: Mapping[str, torch.Tensor], late: Collection[str] = ()) -> Tensors:
        """Copies of dense tensors, of sharded ones this rank's shard; valid until the next call.

        They may be read after :meth:`wait`.

        :param late: which of them nobody changes before :meth:`before_changes`; others may change at once.
        """
        given = {name: tensor.detach() for name, tensor in tensors.items()}
        local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in given.items()}
        there = {name: tensor for name, tensor in local.items() if tensor.device.type == self._device.type}
        sums = torch.stack(
            [torch.zeros((), dtype=torch.int64, device=self._device), *map(_sum, there.values())]
        )
        sizes = [_room(sums), *map(_room, local.values())]
        place_of_sums, *places = (
            place[:size] for place, size in zip(self._places(sizes), sizes, strict=True)
        )
        at_home = {
            name: place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), place in zip(local.items(), places, strict=True)
        }
        for name in local.keys() - there.keys():
            at_home[name].copy_(local[name])
        self._sums = place_of_sums[: sums.nbytes].view(torch.int64)
        self._copied = [(name, at_home[name]) for name in there]
        at_once = [name for name in there if name not in late]
        if at_once:
            ticket = self._transfers.to_host([there[n] for n in at_once], [at_home[n] for n in at_once])
            # Anything may change these next: the device computes on once they are copied.
            self._transfers.compute_after(ticket, [])
        later = [name for name in there if name in late]
        self._ticket = self._transfers.to_host(
            [sums, *(there[n] for n in later)], [self._sums, *(at_home[n] for n in later)]
        )
        return {name: _with_layout_of(given[name], copy) for name, copy in at_home.items()}

    def before_changes(self) -> None:
        """What is computed from here on may change what was copied: the device waits for the copies."""
        if self._ticket is not None:
            self._transfers.compute_after(self._ticket, [])

    def wait(self) -> None:
        """Wait on the host until the copies are there."""
        if self._ticket is not None:
            self._transfers.wait(self._ticket)

    def changed(self) -> str | None:
        """Of copies that are there, one that is not what it was copied from; None where there is none."""
        assert self._sums is not None
        pairs = zip(self._copied, self._sums[1:].tolist(), strict=True)
        return next((name for (name, copy), expected in pairs if int(_sum(copy)) != expected), None)

    def _places(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Bytes of these sizes in the slabs, of which there are more afterwards if they did not suffice."""
        places, lengths = _laid_out(sizes, [len(slab) for slab in self._slabs])
        for length in lengths[len(self._slabs) :]:
            self._slabs.append(self._transfers.buffer(length))
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
    sums = torch.empty(1 + len(local), dtype=torch.int64)
    return sum(_laid_out([_room(sums), *map(_room, local)], [])[1])


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


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's memory, read as integers, on its device; the same wherever it lies in memory."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4 == 0:
        aligned = flat if flat.storage_offset() % 4 == 0 else flat.clone()
        flat = aligned.view(torch.int32)
    return flat.sum(dtype=torch.int64)


def _room(tensor: torch.Tensor) -> int:
    return max(_ALIGNED, -(-tensor.nbytes // _ALIGNED) * _ALIGNED)


def _with_layout_of(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """A shard on the host that stands for the same part of the whole as that on the device."""
    if not isinstance(tensor, DTensor):
        return copy
    shard: torch.Tensor = DTensor(copy, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return shard
