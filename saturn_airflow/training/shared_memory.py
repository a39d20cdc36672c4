"""Tensors of a model that lie in the same memory, and are not the same tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

_Named = tuple[str, torch.Tensor]


def found(model: nn.Module) -> tuple[str, str] | None:
    """The names of a trained parameter and of another parameter or buffer with elements in its memory, if
    there are such. Parts of one storage that have no element in common are none."""
    named = [*model.named_parameters(), *model.named_buffers()]
    places: dict[int, list[_Named]] = {}
    for name, tensor in named:
        if place := _place(tensor):
            places.setdefault(place, []).append((name, tensor))
    for in_one_storage in places.values():
        for together in _in_one_stretch(in_one_storage):
            if both := next(_overlapping(together), None):
                return both
    return None


def _place(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 where it has none of its own."""
    if tensor.layout != torch.strided or not tensor.numel():
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # classes that hold other tensors
        return 0


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor lies in, and the one after the last."""
    width, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return width * first, width * (last + 1)


def _in_one_stretch(named: Sequence[_Named]) -> Iterator[list[_Named]]:
    """Those whose stretches have a byte in common: a file that is mapped is one storage of all weights."""
    together: list[_Named] = []
    reached = 0
    for name, tensor in sorted(named, key=lambda one: _stretch(one[1])):
        first, end = _stretch(tensor)
        if first >= reached:
            if len(together) > 1:
                yield together
            together = []
        together.append((name, tensor))
        reached = max(reached, end)
    if len(together) > 1:
        yield together


def _overlapping(together: Sequence[_Named]) -> Iterator[tuple[str, str]]:
    """Pairs of which one is a trained parameter and the other has an element in its memory."""
    start = min(_stretch(tensor)[0] for _, tensor in together)
    length = max(_stretch(tensor)[1] for _, tensor in together) - start
    trained = [(name, tensor) for name, tensor in together if tensor.requires_grad]
    others = [(name, tensor) for name, tensor in together if not tensor.requires_grad]
    for number, (one, tensor) in enumerate(trained):
        taken = torch.zeros(length, dtype=torch.bool)
        _bytes(taken, start, tensor).fill_(True)
        for name, other in [*trained[number + 1 :], *others]:
            if bool(_bytes(taken, start, other).any()):
                yield one, name


def _bytes(stretch: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """The first byte of each element of ``tensor``, of a stretch from byte ``start`` of its storage on;
    elements that are one in memory are there once."""
    width = tensor.element_size()
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [width * stride for stride in tensor.stride()]
    return stretch.as_strided(sizes, strides, width * tensor.storage_offset() - start)
