"""Sharded tensors in one piece, many in one message: each message costs more than what it carries."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

# Bytes of whole tensors that one message carries, unless a single tensor is larger.
_BYTES = 2**26


def dense(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each of ``tensors`` in one dense piece, in order; where some are sharded every rank must ask together,
    for all of them."""
    for kind, group in itertools.groupby(tensors, _kind):
        alike = list(group)
        if kind is None:
            yield from map(whole, alike)
            continue
        for some in _in_messages(alike):
            yield from _gathered(some)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in one dense piece; of a sharded one every rank must ask together."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        home = tensor.device_mesh.device_type
        if local.device.type != home:
            # What was offloaded is gathered where the mesh is.
            tensor = DTensor.from_local(
                local.to(home),
                tensor.device_mesh,
                tensor.placements,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        return tensor.full_tensor()
    return tensor.to_dense() if tensor.is_sparse else tensor


def _kind(tensor: torch.Tensor) -> Hashable:
    """What tensors must have in common to share a message; None for those that can't."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim > 1:
        return None
    return (tensor.device_mesh, tensor.dtype) if type(tensor.placements[0]) is Shard else None


def _in_messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    some: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        if some and size > _BYTES:
            yield some
            some, size = [], tensor.numel() * tensor.element_size()
        some.append(tensor)
    yield some


def _gathered(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Tensors of one kind in one piece each; torch cuts them as ``torch.chunk`` does."""
    first = tensors[0]
    assert isinstance(first, DTensor)
    mesh = first.device_mesh
    parts = [_parts(tensor, mesh.size()) for tensor in tensors]
    longest = max(sum(part.numel() for part in of_rank) for of_rank in zip(*parts, strict=True))
    # An all-gather takes as much from every rank.
    sent = torch.zeros(longest, dtype=first.dtype, device=mesh.device_type)
    start = 0
    for tensor in tensors:
        assert isinstance(tensor, DTensor)
        local = tensor.to_local()
        sent[start : start + local.numel()] = local.reshape(-1)
        start += local.numel()
    received = sent.new_empty(mesh.size() * longest)
    dist.all_gather_single(received, sent, group=mesh.get_group())
    starts = [rank * longest for rank in range(mesh.size())]
    for tensor, shapes in zip(tensors, parts, strict=True):
        assert isinstance(tensor, DTensor)
        pieces = []
        for rank, shape in enumerate(shapes):
            end = starts[rank] + shape.numel()
            pieces.append(received[starts[rank] : end].view(shape))
            starts[rank] = end
        yield torch.cat(pieces, dim=tensor.placements[0].dim)  # type: ignore[attr-defined]


def _parts(tensor: torch.Tensor, ranks: int) -> list[torch.Size]:
    """The shapes of all ranks' parts."""
    assert isinstance(tensor, DTensor)
    dim = tensor.placements[0].dim  # type: ignore[attr-defined]
    length = tensor.shape[dim]
    # Rounded up, so the last ranks may have less, or nothing.
    size = -(-length // ranks)
    edges = [min(length, rank * size) for rank in range(ranks + 1)]
    return [
        torch.Size((*tensor.shape[:dim], end - start, *tensor.shape[dim + 1 :]))
        for start, end in itertools.pairwise(edges)
    ]
