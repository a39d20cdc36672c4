"""Whether gradients grow as their loss does: what clamps them does otherwise with those of parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from saturn_airflow.launch import failures
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.training.guarding.differences import Tolerance
from saturn_airflow.training.guarding.samples import Samples

#: Takes the loss of a batch, and the gradients of each backward pass from so many times as much, over that.
TakeGradients = Callable[[float], tuple[float, Sequence[Samples]]]


def bent_gradient(
    model: nn.Module,
    gradients: TakeGradients,
    put_back: Callable[[], AbstractContextManager[Any]],
    tolerance: Tolerance,
) -> tuple[str, bool]:
    """The first parameter whose gradient is not as many times as large where the loss is, and whether it, or
    another such one, has hooks; empty where there is none, or that can't be told.

    :param put_back: around each time that gradients are taken: what that changes is as before afterwards.
    """
    taken: list[tuple[float, Sequence[Samples]]] = []
    for scale in (1.0, 2.0**10, 2.0**-10):  # powers of 2 round nothing
        with put_back(), _hooks_put_back(model):
            try:
                taken.append(gradients(scale))
            except Exception as error:
                if failures.is_of_the_machine(error):
                    raise
                return "", False
    (loss, passes), *others = taken
    same = [found for other, found in others if other == loss and len(found) == len(passes)]
    bent = [
        name
        for found in same
        for one, another in zip(passes, found, strict=True)
        for name in _bent(one, another, tolerance)
    ]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    hooked = (n for n in bent if (p := parameters[n])._backward_hooks or p._post_accumulate_grad_hooks)
    if name := next(hooked, ""):
        return name, True
    return next(iter(bent), ""), False


def _bent(expected: Samples, found: Samples, tolerance: Tolerance) -> Iterator[str]:
    floor = tolerance.floor * math.hypot(*(one.norm for one in expected.values() if one is not None))
    for name, gradient in expected.items():
        other = found.get(name)
        if gradient is None or other is None or not math.isfinite(other.norm):
            continue
        if gradient.distance(other) > tolerance.gradient * gradient.norm + floor:
            yield name


@contextmanager
def _hooks_put_back(model: nn.Module) -> Iterator[None]:
    """Hooks on gradients that come or go inside are gone, or there, afterwards."""
    kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
    before = [(p, kind, dict(getattr(p, kind) or {})) for p in parameters_of(model) for kind in kinds]
    yield
    for parameter, kind, hooks in before:
        if (now := getattr(parameter, kind)) is not None:
            now.clear()
            now.update(hooks)


@contextmanager
def larger_backward(
    parameters: Sequence[nn.Parameter], scale: float, see: Callable[[], object]
) -> Iterator[None]:
    """While it lasts, each backward pass is from ``scale`` times as much, and its gradients are over that.

    :param see: called after each, when the gradients are those of that pass alone.
    """
    name = "_engine_run_backward"  # which backward calls, by whatever name it was imported itself
    own = getattr(torch.autograd, name)

    def run_backward(tensors: Any, grad_tensors: Sequence[Any], *args: Any, **kw: Any) -> Any:
        within = torch._C._current_graph_task_id() != -1  # as where activations are computed again
        if within or not kw["accumulate_grad"]:
            return own(tensors, grad_tensors, *args, **kw)
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        larger = tuple(None if one is None else one * scale for one in grad_tensors)
        taken = own(tensors, larger, *args, **kw)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / scale
            see()
            for parameter, there in zip(parameters, before, strict=True):
                if there is not None:
                    parameter.grad = there if parameter.grad is None else parameter.grad + there
        return taken

    setattr(torch.autograd, name, run_backward)
    try:
        yield
    finally:
        setattr(torch.autograd, name, own)
