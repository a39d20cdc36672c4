"""A technique's step, of which each rank holds a part, beside that of a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.guarding.differences import COUNTER, TOLERANCES, Comparison, Difference
from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.samples import Sample, Samples, samples
from saturn_airflow.training.ranks import Ranks

# Differences that are told; there may be hundreds.
_DESCRIBED = 3
# Ways in which a plain loop is put off by rounding, at most.
_WAYS_TO_ROUND = 3
# How many times as large as what rounding makes of the same thing a difference may be. In 26 models with a
# bias before BatchNorm, trained with Adam under ddp and fsdp, it was less than twice as large.
_TIMES_NOISE = 10.0


class HasFormat(Protocol):
    """Something whose number format is noted."""

    number_format: torch.dtype


def gradients_of(parallel: Parallel, aliases: Mapping[str, str]) -> Samples:
    """This rank's gradients by the first names of their parameters; every rank must ask together."""
    return samples({aliases.get(name, name): p.grad for name, p in parallel.trainable().items()})


@contextmanager
def noting_unclipped(
    parallel: Parallel, aliases: Mapping[str, str], noting: bool
) -> Iterator[dict[str, Sample | None]]:
    """Around a step: this rank's gradients, where they are about to be clipped.

    :param noting: whether they are noted.
    """
    found: dict[str, Sample | None] = {}
    clip, before = parallel.clip_gradients, vars(parallel).get("clip_gradients")

    def note(max_norm: float) -> None:
        found.update(gradients_of(parallel, aliases))
        clip(max_norm)

    if not noting:
        yield found
        return
    vars(parallel)["clip_gradients"] = note
    try:
        yield found
    finally:
        vars(parallel).pop("clip_gradients")
        vars(parallel).update({} if before is None else {"clip_gradients": before})


def put_together(
    comparison: Comparison, expected: Step, got: Step, ranks: Ranks, shares: int
) -> list[Difference]:
    """What the ranks found in a step, the same on all of them; all must call this together.

    Every rank that has a buffer must have it right: any of them may write it into a checkpoint.

    :param shares: of the batch that ranks compute. Where these are fewer than the ranks, some may compute
        other parts of the model, and count no passes of the rest.
    """
    found = comparison.of(expected, got), comparison.buffers(expected, got), list(got.gradients)
    everyones = ranks.everyones(found)
    differences = dict.fromkeys(d for found, _, _ in everyones for d in found)
    by_buffer: dict[str, list[Difference | None]] = {}
    for _, own, _ in everyones:
        for name, difference in own.items():
            by_buffer.setdefault(name, []).append(difference)
    for name, found_there in by_buffer.items():
        wrong = [d for d in found_there if d is not None]
        by_any = name.startswith(COUNTER) and shares < ranks.size
        if wrong and (not by_any or len(wrong) == len(found_there)):
            differences[max(wrong, key=lambda d: d.size)] = None
    trained = {name for _, _, names in everyones for name in names}
    if trained and math.isfinite(got.loss):
        differences.update(
            dict.fromkeys(
                Difference(f"the parameter {name!r}", "is trained on no device", 2)
                for name in expected.gradients
                if name not in trained
            )
        )
    return sorted(differences, key=lambda d: d.order)


def beyond_noise(
    differences: Sequence[Difference], noise: Callable[[int], Mapping[str, float]], ranks: Ranks
) -> list[Difference]:
    """Those of ``differences`` that are no noise; every rank must call this together.

    :param noise: :func:`sizes_of` what differs between two plain loops, one of which rounding put off in one
        way or another; only the first rank asks it. What shows in one may not in another, by chance.
    """
    left, largest = list(differences), dict[str, float]()
    for way in range(_WAYS_TO_ROUND):
        if not left:
            break
        told: list[Any] = [noise(way) if ranks.is_first else None]
        if ranks.size > 1:
            dist.broadcast_object_list(told)
        largest.update((what, max(size, largest.get(what, 0.0))) for what, size in told[0].items())
        left = [d for d in left if not d.size <= _TIMES_NOISE * largest.get(d.what, 0.0)]
    return left


def sizes_of(differences: Iterable[Difference]) -> dict[str, float]:
    """How large the differences of each thing are, at most."""
    sizes: dict[str, float] = {}
    for difference in differences:
        sizes[difference.what] = max(difference.size, sizes.get(difference.what, 0.0))
    return sizes


def describe(differences: Sequence[Difference]) -> str:
    """The first few of ``differences``, in words."""
    words = "; ".join(map(str, differences[:_DESCRIBED]))
    more = len(differences) - _DESCRIBED
    return words + (f"; and {more} more" if more > 0 else "")


def put_off_by_rounding(model: nn.Module, number_format: torch.dtype, way: int = 0) -> None:
    """Give ``model`` weights that are off by the last digits of their format, in memory of their own.

    :param way: for others that are off otherwise; from 0 on, less than ``_WAYS_TO_ROUND``.
    """
    eps = torch.finfo(number_format).eps
    # By -2 to 2 of the last digits in turn: nothing is drawn, so that each such model is the same.
    digits = ((7919 - way) * torch.arange(5) + way) % 5 - 2
    for p in parameters_of(model):
        if p.is_floating_point():
            factors = (1 + eps * digits.to(p)).repeat(-(-p.numel() // 5))
            p.data = p.data * factors[: p.numel()].view(p.shape)


@contextmanager
def noting_formats(where: HasFormat, model: nn.Module, *, hooks: bool = True) -> Iterator[None]:
    """Note the lowest format among the weights, what depends on them, and, with ``hooks``, what is kept for
    backward passes."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        if dtype in TOLERANCES:
            where.number_format = max(dtype, where.number_format, key=list(TOLERANCES).index)
        return tensor

    for parameter in parameters_of(model):
        keep(parameter)
    kept = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with kept if hooks else nullcontext(), _SeeingResults(keep):
        yield


class _SeeingResults(TorchFunctionMode):
    """Sees the results of what is called of torch that have gradients: casts keep nothing for theirs."""

    def __init__(self, see: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.requires_grad:
            self._see(result)
        return result
