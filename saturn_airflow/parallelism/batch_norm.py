"""BatchNorm over a batch whose samples are on several devices.

The statistics are those of the whole batch, and so are the gradients that go through them: the maths of
torch's ``SyncBatchNorm``, which wants CUDA, replaces modules, and counts samples that only stand in for an
empty share. Here modules stay what they are; ``torch.nn.functional.batch_norm`` is another one while they
compute.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.agreeing import NOTHING_MORE, Agreement
from saturn_airflow.training.ranks import Ranks

_BACKWARD = " (backward)"
_FIX = (
    "have every sample go through the same BatchNorms, or train on one device or under a technique that does "
    "not share batches"
)


class WholeBatch:
    """A batch of which every rank has a share.

    :ivar counts: whether this rank's samples are part of it, which is to be set before each forward pass: a
        rank without a share computes a sample that stands in.
    :ivar weight: what this rank's loss counts of the whole batch's, where gradients are weighted only after
        the backward pass.
    :ivar ignored: whether BatchNorms take every mean to be 0 and every variance 1 instead.
    :ivar apart: whether each rank has a batch of its own for now.
    :param names: of the BatchNorms that look at it.
    """

    def __init__(self, names: Sequence[str], ranks: Ranks) -> None:
        self.counts = True
        self.weight = 1.0
        self.ignored = False
        self.apart = False
        self._ranks = ranks
        # A group of its own, so that it does not matter what else is on its way between the ranks.
        self._group = dist.new_group()
        exchanged = [f"BatchNorm {name!r}{what}" for name in names for what in ("", _BACKWARD)]
        #: What is exchanged, for :class:`Agreement`.
        self.fixes = dict.fromkeys(exchanged, _FIX)
        #: The order in which it is, among other things where a technique exchanges some of its own.
        self.agreement = Agreement(self.fixes, ranks)

    def sum(self, name: str, values: torch.Tensor, what: str = "") -> torch.Tensor:
        """The sum of every rank's ``values`` for the BatchNorm of that name.

        :raises DoesNotFit: when another rank is at another BatchNorm, or done with all.
        """
        self.agreement.note(f"BatchNorm {name!r}{what}")
        total = values.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def gather(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Every rank's ``values``, of shape (n,), as rows of a table; raises what :meth:`sum` does."""
        table = values.new_zeros(self._ranks.size, len(values))
        table[self._ranks.rank] = values
        return self.sum(name, table)

    def finish_pass(self) -> None:
        """Note that this rank is done with a forward pass: others would wait for it in a BatchNorm.

        :raises DoesNotFit: when another rank is at one.
        """
        if not self.apart:
            self.agreement.note(NOTHING_MORE)


class SyncBatchNorm(_BatchNorm):
    """Torch's own as it computes where there is one process; refusals name it."""

    _check_input_dim = nn.SyncBatchNorm._check_input_dim


def in_one_process(model: nn.Module) -> None:
    """Have the ``SyncBatchNorm`` s of ``model`` look at what they are given, on any device.

    Torch's own look at all processes and refuse CPUs once there is a process group, even of one; the model
    of a plain loop, which runs on the first rank alone, would wait for the others. Over which ranks they
    look, techniques say (:func:`share_batch_norm`).
    """
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm  # type: ignore[assignment]


def share_batch_norm(model: nn.Module, ranks: Ranks) -> None:
    """Have BatchNorms of ``model`` look at the whole batch, wherever its samples are.

    To be called before anything is put around the forward passes of its modules.

    :raises DoesNotFit: in the forward pass, for a BatchNorm that computes its statistics itself.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if ranks.size == 1 or not norms:
        return
    whole = WholeBatch(list(norms), ranks)
    for name, norm in norms.items():
        norm.whole_batch = whole  # type: ignore[assignment]
        norm.forward = _shared(name, norm, whole)  # type: ignore[method-assign, assignment]


def whole_batch_of(model: nn.Module) -> WholeBatch | None:
    """What the BatchNorms of ``model`` share; None where :func:`share_batch_norm` found none."""
    found = (vars(module).get("whole_batch") for module in model.modules())
    return next((whole for whole in found if whole is not None), None)


def no_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Have each sample computed by itself, as :attr:`WholeBatch.ignored` says."""
    return _for_now(model, "ignored")


def each_rank_alone(model: nn.Module, alone: bool = True) -> AbstractContextManager[None]:
    """Have BatchNorms look at their own rank's batch, if ``alone``."""
    return _for_now(model, "apart", alone)


@contextmanager
def _for_now(model: nn.Module, flag: str, value: bool = True) -> Iterator[None]:
    if (whole := whole_batch_of(model)) is None:
        yield
        return
    setattr(whole, flag, value)
    try:
        yield
    finally:
        setattr(whole, flag, False)


def _shared(name: str, norm: _BatchNorm, whole: WholeBatch) -> Callable[[torch.Tensor], torch.Tensor]:
    # Torch's own would count samples that stand in; in one process it is a BatchNorm as others are.
    is_torchs = isinstance(norm, nn.SyncBatchNorm)
    own_forward = functools.partial(_BatchNorm.forward, norm) if is_torchs else norm.forward

    @functools.wraps(norm.forward)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _OverRanks(whole, name) as over_ranks:
            result = own_forward(*args, **kwargs)
        if norm.training and not over_ranks.was_used:
            raise DoesNotFit(
                f"{name!r} is a {type(norm).__name__}, which computes its statistics itself, and so those of "
                "one device's samples; use torch.nn.functional.batch_norm in it, or train on one device"
            )
        return result

    return forward


class _OverRanks(TorchFunctionMode):
    """Replaces ``torch.nn.functional.batch_norm`` where it is about to look at the batch."""

    def __init__(self, whole: WholeBatch, name: str) -> None:
        super().__init__()
        self.was_used = False
        self._whole = whole
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.batch_norm:
            self.was_used = True
            arguments = _SIGNATURE.bind(*args, **(kwargs or {}))
            arguments.apply_defaults()
            if arguments.arguments.pop("training") and not self._whole.apart:
                return batch_norm(self._whole, self._name, **arguments.arguments)
        return func(*args, **(kwargs or {}))


_SIGNATURE = inspect.signature(nn.functional.batch_norm)


def batch_norm(
    whole: WholeBatch,
    name: str,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """``torch.nn.functional.batch_norm`` in training, over every rank's ``input`` of shape (N, C, ...).

    :param name: of the BatchNorm that computes.
    :raises ValueError: when the whole batch has one value per channel.
    """
    wide = torch.promote_types(input.dtype, torch.float32)
    if whole.ignored:
        zeros = torch.zeros(input.size(1), dtype=wide, device=input.device)
        return nn.functional.batch_norm(input, zeros, zeros + 1, weight, bias, eps=eps)
    with torch.no_grad():
        count, mean, squares = _moments(whole, name, input.detach().to(wide))
        variance = squares / count
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean), momentum)
        if running_var is not None:
            running_var.lerp_((squares / (count - 1)).to(running_var), momentum)
        inverse = (variance + eps).rsqrt()
    normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, mean.to(wide), inverse.to(wide), count, whole, name
    )
    return normalised


def _moments(
    whole: WholeBatch, name: str, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all ranks: values per channel, their mean, and the sum of their squared distances from it.

    Moments of parts are put together as in Chan et al., "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979).
    """
    channels, own_count = x.size(1), x.numel() // x.size(1) if whole.counts else 0
    own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    if own_count:
        mean = x.mean(_all_but_channels(x))
        squares = (x - _per_channel(mean, x)).square().sum(_all_but_channels(x))
        # Filled on the device: a copy from the host would wait for all that the device has to do.
        own[0] = own_count
        own[1 : 1 + channels], own[1 + channels :] = mean, squares
    counts, means, squares = whole.gather(name, own).tensor_split([1, 1 + channels], dim=1)
    count = counts.sum()
    if own_count < 2 and count < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    mean = (counts * means).sum(0) / count
    return count, mean, (squares + counts * (means - mean).square()).sum(0)


class _Normalise(torch.autograd.Function):
    """The affine normalised input; its gradients take into account what moments of the whole batch do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        count: torch.Tensor,
        whole: WholeBatch,
        name: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.whole, ctx.name, ctx.counts = whole, name, whole.counts
        ctx.loss_weight = whole.weight if whole.counts else 1.0
        ctx.bias_dtype = None if bias is None else bias.dtype
        scale = inverse if weight is None else inverse * weight
        out = (x - _per_channel(mean, x)) * _per_channel(scale, x)
        if bias is not None:
            out = out + _per_channel(bias, x)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # With the normalised input n and means over the whole batch, the gradient g of what comes out gives
        # inverse * weight * (g - mean(g) - n * mean(g * n)) for the input. Each rank's g is of its own loss,
        # and is multiplied by ``loss_weight`` only after the backward pass: so every rank's sums are
        # multiplied by its weight here, and their total is divided by this rank's, which it gets again later.
        x, weight, mean, inverse, count = ctx.saved_tensors
        gradient = gradient.to(mean.dtype) if ctx.counts else torch.zeros_like(gradient, dtype=mean.dtype)
        normalised = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
        around = _all_but_channels(x)
        own = torch.stack([gradient.sum(around), (gradient * normalised).sum(around)])
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            weighted = ctx.whole.sum(ctx.name, own.to(torch.float64) * ctx.loss_weight, _BACKWARD)
            along_mean, along_scale = weighted / (count * ctx.loss_weight)
            of_input = gradient - _per_channel(along_mean.to(gradient), x)
            of_input = of_input - normalised * _per_channel(along_scale.to(gradient), x)
            scale = inverse if weight is None else inverse * weight
            of_input = (of_input * _per_channel(scale, x)).to(x.dtype)
            if not ctx.counts:
                of_input.zero_()
        if ctx.needs_input_grad[1]:
            of_weight = own[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = own[0].to(ctx.bias_dtype)
        return of_input, of_weight, of_bias, None, None, None, None, None


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``values`` of shape (C,) so that they broadcast over ``x`` of shape (N, C, ...)."""
    return values.view(1, -1, *(1 for _ in range(x.ndim - 2)))
