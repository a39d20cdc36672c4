"""Gradients that some ranks have and others don't, as where each trains other experts of a mixture.

A missing gradient is a zero in the sum over the ranks. One that is missing on every rank stays missing, so
that the optimizer leaves its parameter alone, as it does on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
import torch.distributed as dist
from torch import nn


def forget_missing(parameters: Mapping[str, nn.Parameter], here: Set[str], device: torch.device) -> None:
    """Remove the gradients of those ``parameters`` that no rank computed; every rank calls this together.

    :param here: the names of those whose gradients this rank computed.
    """
    found = torch.tensor([float(name in here) for name in parameters], device=device)
    dist.all_reduce(found)
    for parameter, count in zip(parameters.values(), found.tolist(), strict=True):
        if not count:
            parameter.grad = None
