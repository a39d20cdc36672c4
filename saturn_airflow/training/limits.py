"""What some techniques can't train, found by looking at the model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.request import DoesNotFit


def refuse_batch_norm(model: nn.Module, ranks: Ranks) -> None:
    """Refuse to share batches of a model that looks at all of a batch at once.

    :raises DoesNotFit: on several devices, when the model has a BatchNorm.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and ranks.size > 1:
            raise DoesNotFit(
                f"{name or 'the model'} is a {type(module).__name__}, whose statistics would be those of "
                "each device's share of the batch; use LayerNorm or GroupNorm, or train on one device"
            )


def refuse_scalar_parameters(model: nn.Module, why: str) -> None:
    """Refuse parameters without a dimension.

    :raises DoesNotFit: when the model has one.
    """
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise DoesNotFit(f"parameter {name!r} has no dimension, and {why}; give it the shape (1,)")
