"""Whether a ``Trainer``'s batches come in an order that a resumed training sees again."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import Trainer

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.trainers import seen_state

#: So many batches of the second epoch are compared.
_COMPARED = 1000


def check(trainer: Trainer, loader: Any) -> list[str]:
    """Check that the order of each epoch's batches is one of the epoch's number alone.

    A resumed training makes its samplers anew and begins in a later epoch, with other random numbers than
    those with which the training that was not stopped came there. What counts is what samplers do: a class
    that is derived from one of torch's may draw an order of its own.

    :param loader: one that the trainer has just made; random numbers are drawn.
    :returns: what of the samplers' attributes is another once they have given an epoch's indices.
    :raises JobError: naming the sampler.
    """
    order = getattr(loader, "batch_sampler", None)
    sampler = getattr(order, "sampler", None)
    if type(order) is BatchSampler and type(sampler) in (SeedableRandomSampler, SequentialSampler):
        return []
    if order is not None:
        anew: Any = trainer.get_train_dataloader()
        _seed(1)
        resumed = _epoch(anew.batch_sampler, 1, _COMPARED)
        _seed(2)
        _epoch(order, 0, 0)
        before = seen_state.of_parts(seen_state.samplers_of(loader), trainer)
        _epoch(order, 0)
        after = seen_state.of_parts(seen_state.samplers_of(loader), trainer)
        if _epoch(order, 1, _COMPARED) == resumed:
            return seen_state.differing(before, after)
    known = type(order) in (BatchSampler, type(None))
    raise JobError(
        f"the Trainer's data come in the order of a {type(sampler if known else order).__name__}, which a "
        "resumed training would draw anew: in a later epoch it would see other batches. Let the order follow "
        "from the epoch alone, as set_epoch(epoch) tells it to a sampler or batch sampler, or have "
        "train_sampling_strategy 'random' or 'sequential' with use_seedable_sampler=True"
    )


def _epoch(order: Any, epoch: int, batches: int | None = None) -> list[list[Any]]:
    """The indices of an epoch's first ``batches``, or of all."""
    inner = getattr(order, "batch_sampler", None)
    part: Any
    for part in (order, getattr(order, "sampler", None), inner, getattr(inner, "sampler", None)):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    return [list(batch) for batch in islice(iter(order), batches)]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
