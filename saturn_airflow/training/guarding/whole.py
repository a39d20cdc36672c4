"""The job's own model beside the one that a technique trains: bare, until it gets the weights of a moment."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from saturn_airflow.parallelism.module_state import copied, parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.guarding.gathering import dense
from saturn_airflow.training.model_attributes import Attributes
from saturn_airflow.training.optim import own_classes
from saturn_airflow.training.ranks import Ranks

Tensors = dict[str, torch.Tensor]


def can_be_copied(model: nn.Module) -> bool:
    """Whether a copy of ``model`` computes as one that is loaded anew: it would be without the hooks of its
    parameters, functions that refer to ``model`` would go on doing so, and what TorchScript has compiled
    would have tensors in the place of its parameters."""
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters_of(model))
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    return not (hooked or scripted) and not any(
        refers_to_others(value)
        for module in model.modules()
        for attribute in vars(module).values()
        for value in (attribute.values() if isinstance(attribute, dict) else [attribute])
    )


def refers_to_others(value: Any) -> bool:
    """Whether a function of a job's own refers to variables around it, or has modules or tensors as defaults:
    a copy of a function is the function itself."""
    while isinstance(value, functools.partial):
        value = value.func
    if not isinstance(value, types.FunctionType):
        return False
    library = (value.__module__ or "").partition(".")[0]
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    refers = value.__closure__ is not None or any(isinstance(d, nn.Module | torch.Tensor) for d in defaults)
    return refers and library not in own_classes.LIBRARIES


def without_weights(model: nn.Module) -> nn.Module | None:
    """A copy of ``model`` whose parameters are empty; None where a copy would not be the same."""
    if not can_be_copied(model):
        return None
    empty = {
        id(p): nn.Parameter(torch.empty(0, dtype=p.dtype), requires_grad=p.requires_grad)
        for p in parameters_of(model)
    }
    try:
        return copy.deepcopy(model, dict(empty))
    except Exception:  # a module may hold anything
        return None


def with_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], attributes: Attributes) -> nn.Module:
    """``model`` with the parameters, buffers and attributes of another moment; parameters share memory with
    ``weights``, by the names they have in the model."""
    memo: dict[int, Any] = {}  # what several modules hold, they hold together
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            now = weights.get(f"{prefix}.{name}" if prefix else name)
            if buffer is not None and now is not None:
                module._buffers[name] = now.clone()
        # Where a stage lacks a parameter, an attribute stands in its place.
        own = {k: value for k, value in attributes.get(prefix, {}).items() if k not in module._parameters}
        vars(module).update(copied(own, memo))
    _register_others(model, weights)
    return model


def _register_others(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Register what training has made a buffer of ``model`` since it was loaded."""
    there = _all_named(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in tensors.keys() - there.keys():
        prefix, _, key = name.rpartition(".")
        module = modules.get(prefix)
        if module is not None and (key in module._buffers or not hasattr(module, key)):
            module.register_buffer(key, tensors[name].clone())


def gathered(parallel: Parallel) -> Tensors:
    """All parameters and buffers of the whole model, on the first rank; every rank must call this together.

    What is whole there is handed out itself; the rest is on the CPU. The other ranks get nothing.
    """
    ranks = parallel.ranks
    here = _named(parallel)
    split = {name: tensor.detach() for name, tensor in here.items() if isinstance(tensor, DTensor)}
    kept: Tensors = {}
    for name, tensor in zip(split, dense(split.values()), strict=True):
        if ranks.is_first:
            kept[name] = tensor.cpu()
    for name, owner, shape, dtype in _owners(here, ranks):
        if name in split:
            continue
        tensor = here[name].detach() if name in here else torch.empty(shape, dtype=dtype)
        if owner and ranks.rank == owner:
            dist.send(_bytes(tensor.cpu()), 0)
        elif owner and ranks.is_first:
            dist.recv(received := _bytes(tensor), owner)
            tensor = received.view(dtype).view(shape)
        if ranks.is_first:
            kept[name] = tensor
    return kept


def bytes_to_gather(parallel: Parallel) -> int:
    """Bytes of what :func:`gathered` puts into the host's memory; every rank must call this together."""
    here = _named(parallel)
    return sum(
        shape.numel() * dtype.itemsize
        for name, owner, shape, dtype in _owners(here, parallel.ranks)
        if owner or isinstance(here.get(name), DTensor)
    )


def _named(parallel: Parallel) -> Tensors:
    model = parallel.model
    return dict(model.named_parameters()) | dict(model.named_buffers(remove_duplicate=False))


def _all_named(model: nn.Module) -> Tensors:
    named = (model.named_parameters, model.named_buffers)
    return {name: tensor for of in named for name, tensor in of(remove_duplicate=False)}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor: not all backends send all types."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _owners(here: Tensors, ranks: Ranks) -> list[tuple[str, int, torch.Size, torch.dtype]]:
    """Of every tensor its name, the first rank that has it, and how it looks there."""
    looks = {name: (t.shape, t.dtype) for name, t in here.items()}
    found: dict[str, tuple[str, int, torch.Size, torch.dtype]] = {}
    for rank, there in enumerate(ranks.everyones(looks)):
        for name, (shape, dtype) in there.items():
            found.setdefault(name, (name, rank, shape, dtype))
    return list(found.values())
