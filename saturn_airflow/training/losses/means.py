"""The means that a loss is made of, seen and replaced while it is computed.

Whoever calls torch's losses, by whatever name, ends in the functions below; where one of them would return
a mean, a listener gets the sum and its count and says what to return. ``torch._C._nn`` is a private part of
torch (seen in 2.13): nothing else in Saturn may use it. Means that do not pass here are not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

Count = float | torch.Tensor

_MEAN, _NONE, _SUM = 1, 0, 2  # what torch.nn._reduction calls them


class Listener(Protocol):
    """Gets told of each mean."""

    def mean(self, total: torch.Tensor, count: Count) -> torch.Tensor:
        """What to return in the place of ``total / count``, both scalars."""
        ...


_listener: Listener | None = None


def set_listener(listener: Listener | None) -> None:
    """Have ``listener`` told of all means from now on, those computed again in backward passes too."""
    global _listener
    if listener is not None:
        _install()
    _listener = listener


def _elements(original: Any, at: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Count]:
    """A loss that is a mean over its elements."""
    args[at] = _SUM
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return original(*args, **kwargs), shape.numel()


def _rows(original: Any, at: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Count]:
    """A loss that is a mean over what it is without one."""
    args[at] = _NONE
    losses = original(*args, **kwargs)
    return losses.sum(), losses.numel()


def _classes(original: Any, at: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Count]:
    """A loss that is a mean over the labels that are not ignored, by the weights of their classes."""
    args[at] = _SUM
    logits, target, weight, _, ignored = args[:5]
    total = original(*args, **kwargs)
    # Probabilities of all classes: a mean over what has some, whatever the weights of classes are
    # (torch.nn.CrossEntropyLoss).
    if target.is_floating_point():
        return total, logits.numel() // logits.shape[min(1, logits.ndim - 1)]
    counted = target != ignored
    if weight is None:
        return total, counted.sum()
    # What is ignored, such as -100, is no index.
    return total, (weight[torch.where(counted, target, 0)] * counted).sum()


def _sequences(original: Any, at: int, args: list[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Count]:
    """CTC: a mean over samples, each divided by the length of its target (torch.nn.CTCLoss)."""
    args[at] = _NONE
    losses = original(*args, **kwargs)
    lengths = torch.as_tensor(args[3], dtype=losses.dtype, device=losses.device)
    return (losses / lengths.clamp(min=1)).sum(), losses.numel()


# Where each function is, and at which of its arguments the reduction stands.
_LOSSES: list[tuple[Any, str, int, Callable[..., tuple[torch.Tensor, Count]]]] = [
    (torch._C._nn, "cross_entropy_loss", 3, _classes),
    (torch._C._nn, "nll_loss_nd", 3, _classes),
    (torch._C._nn, "mse_loss", 2, _elements),
    (torch._C._nn, "l1_loss", 2, _elements),
    (torch._C._nn, "smooth_l1_loss", 2, _elements),
    (torch._C._nn, "huber_loss", 2, _elements),
    (torch._C._nn, "binary_cross_entropy", 3, _elements),
    (torch, "binary_cross_entropy_with_logits", 4, _elements),
    (torch, "kl_div", 2, _elements),
    (torch._C._nn, "soft_margin_loss", 2, _rows),
    (torch._C._nn, "multi_margin_loss", 5, _rows),
    (torch._C._nn, "multilabel_margin_loss", 2, _rows),
    (torch, "poisson_nll_loss", 5, _rows),
    (torch, "hinge_embedding_loss", 3, _rows),
    (torch, "margin_ranking_loss", 4, _rows),
    (torch, "cosine_embedding_loss", 4, _rows),
    (torch, "triplet_margin_loss", 7, _rows),
    (torch, "ctc_loss", 5, _sequences),
]

# Those of torch.nn.functional that compute a mean by weights themselves.
_WEIGHED = ("mse_loss", "l1_loss")


def _install() -> None:
    for name in _WEIGHED:
        original = getattr(nn.functional, name)
        if not hasattr(original, "has_listener"):
            setattr(nn.functional, name, _weighed_with_listener(original))
    for module, name, at, take_apart in _LOSSES:
        original = getattr(module, name)
        if not hasattr(original, "has_listener"):
            setattr(module, name, _with_listener(original, at, take_apart))


def _with_listener(original: Any, at: int, take_apart: Callable[..., tuple[torch.Tensor, Count]]) -> Any:
    def loss(*args: Any, **kwargs: Any) -> Any:
        if _listener is None or len(args) <= at or args[at] != _MEAN:
            return original(*args, **kwargs)
        return _listener.mean(*take_apart(original, at, list(args), kwargs))

    loss.has_listener = True  # type: ignore[attr-defined]
    return loss


def _weighed_with_listener(original: Any) -> Any:
    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        weight = kwargs.get("weight")
        is_mean = len(args) <= 2 and kwargs.get("reduction", "mean") == "mean"
        # The mean has gradients for weights that are learned, too, and what it is taken over has none.
        if _listener is None or weight is None or weight.requires_grad or not is_mean:
            return original(*args, **kwargs)
        return _listener.mean(original(*args, **{**kwargs, "reduction": "sum"}), weight.sum())

    loss.has_listener = True  # type: ignore[attr-defined]
    return loss
