"""Gradients that some ranks have and others don't, as where each trains other experts of a mixture.

A missing gradient is a zero in the sum over the ranks. One that is missing on every rank stays missing, so
that the optimizer leaves its parameter alone, as it does on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import nn

from saturn_airflow.training.ranks import Ranks


def forget_missing(parameters: Mapping[str, nn.Parameter], here: Set[str], ranks: Ranks) -> None:
    """Remove the gradients of those ``parameters`` that no rank computed; every rank calls this together.

    :param here: the names of those whose gradients this rank computed.
    """
    found = ranks.sums([float(name in here) for name in parameters])
    for parameter, count in zip(parameters.values(), found, strict=True):
        if not count:
            parameter.grad = None
