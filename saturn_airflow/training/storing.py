"""The form in which checkpoints keep tensors: dense, contiguous, with a dimension, of a common dtype."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

# What safetensors' readers in torch know by another name only: the same bytes under a dtype of the same size.
_READ_AS = {
    torch.bool: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a checkpoint keeps it; the same memory wherever that is possible.

    Complex numbers are pairs of real ones in a last dimension of 2.
    """
    if isinstance(tensor, DTensor):
        return _contiguous_shard(tensor)
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.ndim:
        tensor = tensor.reshape(1)
    return tensor.contiguous().view(_READ_AS.get(tensor.dtype, tensor.dtype))


def room(shape: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for the stored form of a tensor of ``dtype``, of which ``shape`` is the stored form's."""
    real = torch.empty((), dtype=dtype).real.dtype if dtype.is_complex else dtype
    return torch.zeros(shape, dtype=_READ_AS.get(real, real), device=device)


def original(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The dense tensor of ``dtype`` with at least one dimension that ``kept`` is the stored form of."""
    if isinstance(kept, DTensor):
        return kept
    return torch.view_as_complex(kept) if dtype.is_complex else kept.view(dtype)


def restore(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    """Give ``tensor`` the values of its stored form ``kept``; nothing to do where they share memory."""
    if isinstance(tensor, DTensor):
        assert isinstance(kept, DTensor)
        _fill(tensor.to_local(), kept.to_local())
        return
    values = original(kept, tensor.dtype).reshape(tensor.shape)
    if tensor.layout != torch.strided:
        tensor.data = values.to_sparse(layout=tensor.layout)
    elif _overlaps(tensor):
        tensor.data = values
    else:
        _fill(tensor, values)


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, copied where two of them lie in one piece of memory, which no file can hold."""
    seen: set[int] = set()
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.untyped_storage().data_ptr()
        shared = place in seen and local.numel() > 0 and not isinstance(tensor, DTensor)
        result[name] = tensor.clone() if shared else tensor
        seen.add(place)
    return result


def _contiguous_shard(tensor: DTensor) -> DTensor:
    local = tensor.to_local()
    if local.is_contiguous():
        return tensor
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=stride
    )


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.data_ptr() != values.data_ptr() or tensor.stride() != values.stride():
        tensor.copy_(values)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements lie in the same place, as those of an expanded tensor do."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
