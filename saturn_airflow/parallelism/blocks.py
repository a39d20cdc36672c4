"""The repeated blocks of a model, such as a transformer's layers: what techniques wrap, stream or spread."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.recomputation import Compute, recomputed


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The longest run of blocks of one kind, by name, in the order they are listed in the model.

    Looks for the ``ModuleList`` or ``Sequential`` with the most parameters among those that hold two or more
    modules of one class with parameters; an empty list where there is none. A ``ModuleList`` in another one
    counts as what it holds.
    """
    best: list[tuple[str, nn.Module]] = []
    best_size = 0
    for name, holder in model.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.Sequential):
            continue
        by_class: dict[type[nn.Module], list[tuple[str, nn.Module]]] = {}
        for child_name, child in _children(name, holder):
            by_class.setdefault(type_before_parametrizations(child), []).append((child_name, child))
        for alike in by_class.values():
            size = sum(p.numel() for _, child in alike for p in parameters_of(child))
            if len(alike) > 1 and size > best_size:
                best, best_size = alike, size
    return best


def _children(name: str, holder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in holder.named_children():
        full_name = f"{name}.{key}".lstrip(".")
        if isinstance(child, nn.ModuleList):
            yield from _children(full_name, child)
        else:
            yield full_name, child


def blocks_to_run(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of :func:`find_blocks`, for who runs them in a way of its own.

    :raises DoesNotFit: when what calls them is compiled, which takes what is run into the compilation.
    """
    blocks = find_blocks(model)
    for name, module in model.named_modules():
        inside = f"{name}." if name else ""
        calls_blocks = not name or any(block.startswith(inside) for block, _ in blocks)
        if calls_blocks and (how := how_compiled(module)):
            what = f"whose part {name!r}" if name else "that"
            raise DoesNotFit(
                f"load_model returns a model {what} {how} has compiled as a whole, and this technique runs "
                "its blocks one by one; return it as it is, and say HParams(compile=True), which compiles "
                "blocks"
            )
    return blocks


def how_compiled(module: nn.Module) -> str:
    """By what the forward pass of ``module`` was compiled; empty where it was not."""
    if "_orig_mod" in module._modules:  # without an import of the compiler, which takes long
        return "torch.compile"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "its compile()"
    return "torch.compile" if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable") else ""


def recompute_blocks(model: nn.Module) -> None:
    """Keep only the inputs of each block, and compute it again in the backward pass.

    :raises DoesNotFit: now or in the forward pass, for a block that can't be computed twice the same.
    """
    for name, block in blocks_to_run(model):
        block.forward = recomputed(name, block, own_forward(block))


def own_forward(block: nn.Module) -> Compute:
    """The forward pass of ``block``, compiled if the block was: what is put around it then is not."""
    given = block._compiled_call_impl
    if given is None:
        return block.forward
    block._compiled_call_impl = None
    # Its own compiler, with the backend that the user may have chosen; torch has no name for it.
    compiler = inspect.getclosurevars(given).nonlocals.get("self", torch.compile)
    compiled: Compute = compiler(block.forward)
    return compiled


def compile_blocks(model: nn.Module) -> None:
    """Compile each block by itself, which is quicker than all at once; the whole model where it has none."""
    for module in [block for _, block in find_blocks(model)] or [model]:
        module.compile()
