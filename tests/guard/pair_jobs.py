"""Losses of pairs within a batch, of which a few samples have none."""

from __future__ import annotations

import torch


def pairs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The first two samples of each class are a pair, to be told from those of other classes."""
    places = [(targets == label).nonzero().flatten()[:2] for label in range(4)]
    found = [place for place in places if len(place) == 2]
    if not found:
        return outputs.sum() * 0
    firsts, seconds = outputs[torch.stack(found)].unbind(1)
    return -(firsts @ seconds.T).log_softmax(1).diagonal().sum() / len(found)


def nothing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum() * 0
