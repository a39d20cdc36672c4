"""Looking at a job's DataLoader and its samples, without disturbing those who go through the data."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)


def aside(loader: DataLoader[Any]) -> Any:
    """Its dataset, to be looked at in this process.

    Where there are worker processes it is a copy: a file that it opens with its first sample would otherwise
    be inherited by all of them, which then read from wherever one of them had got to.
    """
    return _copied(loader.dataset) if loader.num_workers else loader.dataset


def _copied(dataset: Any) -> Any:
    """A copy with attributes of its own, and of the datasets that it wraps; what they hold is shared."""
    try:
        copied = copy.copy(dataset)
    except Exception:
        return dataset
    for name, value in list(getattr(copied, "__dict__", {}).items()):
        if isinstance(value, Dataset):
            setattr(copied, name, _copied(value))
        elif type(value) in (list, tuple) and any(isinstance(item, Dataset) for item in value):
            setattr(copied, name, type(value)(map(_copied, value)))
    return copied


def any_sample(loader: DataLoader[Any]) -> Any:
    """A sample as the loader's ``collate_fn`` gets it, taken without disturbing who goes through the data.

    :raises Exception: when there is none to be had.
    """
    dataset = aside(loader)
    if loader.batch_sampler is None and loader.batch_size is None:
        raise TypeError("its dataset makes batches")
    if not isinstance(dataset, IterableDataset):
        return dataset[0]
    samples: Any = iter(dataset)
    if samples is dataset:
        raise TypeError("its dataset can be gone through once")
    return next(samples)


def collates_each_alone(collate: Any) -> bool:
    """Whether what ``collate`` makes of a sample does not depend on those beside it."""
    of = collate if hasattr(collate, "__qualname__") else type(collate)
    return collate is default_collate or (
        of.__module__ == "transformers.data.data_collator"
        and of.__qualname__ in ("default_data_collator", "torch_default_data_collator", "DefaultDataCollator")
    )


def is_table(loader: Any) -> bool:
    """Whether samples can be fetched by index in an order of our own choosing."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return False
    if not hasattr(loader.dataset, "__getitem__") or not hasattr(loader.dataset, "__len__"):
        return False
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)
    return type(sampler) is SequentialSampler
