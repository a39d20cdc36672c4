"""Looking at a job's DataLoader and its samples, without disturbing those who go through the data."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import rng
from saturn_airflow.training.data_state import DataState
from saturn_airflow.training.given_order import generator_of
from saturn_airflow.training.nested import map_parts
from saturn_airflow.training.optim import plain_values
from saturn_airflow.training.seeded_samples import SeededOrder, SeededSamples


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


def samples_stand_alone(loader: DataLoader[Any], seed: int) -> bool:
    """Whether a sample that is fetched by its index, and a batch of samples, is the same whatever was fetched
    before it, as it is not where the dataset or the collate function draws from a generator of its own,
    counts, mixes samples with earlier ones, or remembers what it drew.

    :raises JobError: where what was drawn is remembered, and nobody sees where.
    """
    dataset, collate = aside(loader), loader.collate_fn
    if any(hasattr(part, "set_epoch") for part in (dataset, collate)):
        return False
    if loader.num_workers and _may_change_dataset(loader.worker_init_fn):
        return False
    samples = SeededSamples(dataset, seed)
    keys = [(0, 0), (0, len(dataset) // 2)]
    if not _forgets_others(dataset, seed, keys) or not _are_fetched_alone(dataset, seed, keys):
        return False
    with DataState(dataset).put_back(), DataState(collate).put_back():
        try:
            first, state = samples.__getitems__(keys), DataState(dataset)
            again = samples.__getitems__(keys)
            # Where a file is read from does not matter: other samples would show that it does.
            if state.changed(in_files=False) or not all(map(alike, first, again)):
                return False
        except Exception:
            return False  # such as where only workers have opened its files
        with contextlib.suppress(Exception):  # samples that can't be copied, or collated with each other
            first, again = copy.deepcopy((first, again))  # which some change
            batch, state = collate(first), DataState(collate)
            rng.seed(seed, "collate", *itertools.chain.from_iterable(keys))
            return alike(batch, collate(again)) and not state.changed(in_files=False)
    return True


def _forgets_others(dataset: Any, seed: int, keys: list[tuple[int, int]]) -> bool:
    """Whether samples are the same where others were fetched before, or they themselves in another epoch.

    :param keys: of some samples.
    :raises JobError: where what was drawn for them is remembered, and nobody sees where.
    """
    last = len(dataset) - 1
    # Copies: what they get as new attributes, the dataset has not.
    one, other, third = (_copied(dataset) for _ in range(3))
    with DataState(dataset).put_back() as back:
        try:
            forward = copy.deepcopy(SeededSamples(one, seed).__getitems__(keys))
            back()
            backward = copy.deepcopy(SeededSamples(other, seed).__getitems__(keys[::-1]))[::-1]
            if not all(map(alike, forward, backward)):
                return False
            back()
            state = DataState(third)
            # Of a sample that was not fetched yet.
            once, again = (_draws(third, (seed, "sample", epoch, last), last) for epoch in (0, 1))
            remembers = once and not again and last not in [index for _, index in keys]
        except Exception:
            return True  # whoever fetches them says why they can't be
        seen = state.changed(in_files=False)
    if remembers and not seen:
        raise JobError(
            "the dataset draws random numbers for a sample when that is fetched first, and remembers them "
            "where no checkpoint looks, as functools.lru_cache does: a job that is resumed, and each device, "
            "would draw others. Draw by a generator that the sample's index seeds "
            "(torch.Generator().manual_seed(index)), or keep what was drawn in an attribute of the dataset"
        )
    return not remembers


def _are_fetched_alone(dataset: Any, seed: int, keys: list[tuple[int, int]]) -> bool:
    """Whether samples that a loader gets at once, where the dataset has ``__getitems__``, are those that it
    gets one by one, as they are not where a transform works on all of a batch."""
    at_once = getattr(dataset, "__getitems__", None)
    if not at_once:
        return True
    indices, found = [index for _, index in keys], []
    with DataState(dataset).put_back() as back:
        try:
            for fetch in (at_once, lambda indices: [dataset[index] for index in indices]):
                rng.seed(seed, "at once")
                found.append(copy.deepcopy(fetch(indices)))
                back()
        except Exception:
            return False  # such as where it has nothing but that
    return len(found[0]) == len(found[1]) and all(map(alike, *found))


def _draws(dataset: Any, position: tuple[int | str, ...], index: int) -> bool:
    """Whether a sample is drawn by the global generators, seeded from ``position``."""
    rng.seed(*position)
    before = _states()
    dataset[index]
    return before != _states()


def _states() -> tuple[Any, ...]:
    """The global generators', to be compared."""
    numpys = str(np.random.get_state(legacy=False)["state"])
    return random.getstate(), numpys, torch.get_rng_state().numpy().tobytes()


def _may_change_dataset(worker_init: Any) -> bool:
    """Whether a ``worker_init_fn`` may reach the dataset of its worker, which is then not that of others."""
    if worker_init is None:
        return False
    code = getattr(worker_init, "__code__", None)
    return code is None or bool(code.co_freevars) or "get_worker_info" in code.co_names


def alike(one: Any, other: Any) -> bool:
    """Whether two samples are the same, as far as one can see."""
    parts: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    map_parts(parts[0].setdefault, one)
    map_parts(parts[1].setdefault, other)
    return parts[0].keys() == parts[1].keys() and all(
        _same(part, parts[1][path]) for path, part in parts[0].items()
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and one.dtype.kind not in "biufc":  # texts, times; objects can't be told
        return one.dtype.kind == "O" or (isinstance(other, np.ndarray) and np.array_equal(one, other))
    if isinstance(one, torch.Tensor | np.ndarray) and type(one) is type(other):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.layout != torch.strided or other.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    return not plain_values.is_scalar(one) or one != one or one == other


def ordered(loader: DataLoader[Any], job: Job, in_order: bool) -> DataLoader[Any]:
    """A loader of the same samples that is run through, shuffled where ``loader`` shuffles and not
    ``in_order``: by the generator that it was given, else as the job's seed says."""
    reorders = shuffles(loader.sampler) and not in_order
    generator = generator_of(loader) if reorders else None
    own_order: Any = SeededOrder(loader.dataset, job.hparams.seed) if reorders else None
    return DataLoader(
        loader.dataset,
        batch_size=job.hparams.batch_size or loader.batch_size,
        sampler=own_order if generator is None else loader.sampler,
        generator=None if generator is None else loader.generator,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
        **fetching(loader),
    )


def fetching(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader fetches its batches, as another takes it."""
    names = "num_workers collate_fn pin_memory timeout multiprocessing_context prefetch_factor"
    return {name: getattr(loader, name) for name in names.split()}


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's parts which epoch begins, as a training loop does that shuffles by epochs."""
    sampler = getattr(loader, "batch_sampler", None)
    names = ("dataset", "sampler", "collate_fn")
    parts = [loader, sampler, getattr(sampler, "sampler", None), *(getattr(loader, n, None) for n in names)]
    told: set[int] = set()
    for part in parts:
        own = getattr(part, "set_epoch", None)
        if callable(own) and id(part) not in told:
            told.add(id(part))
            own(epoch)


def collates_each_alone(collate: Any) -> bool:
    """Whether what ``collate`` makes of a sample does not depend on those beside it."""
    of = collate if hasattr(collate, "__qualname__") else type(collate)
    return collate is default_collate or (
        of.__module__ == "transformers.data.data_collator"
        and of.__qualname__ in ("default_data_collator", "torch_default_data_collator", "DefaultDataCollator")
    )


def changes_batches(loader: DataLoader[Any]) -> bool:
    """Whether a loader's class has an ``__iter__`` of its own, which may change what torch's would give."""
    return type(loader).__iter__ is not DataLoader.__iter__


def shuffles(sampler: Any) -> bool:
    """Whether an order drawn anew is as good as that of ``sampler``: classes derived from it may choose."""
    return isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__


def is_table(loader: Any) -> bool:
    """Whether samples can be fetched by index in an order of our own choosing, and batches are what the
    loader's ``collate_fn`` makes of them."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or changes_batches(loader):
        return False
    if not hasattr(loader.dataset, "__getitem__") or not hasattr(loader.dataset, "__len__"):
        return False
    sampler: Any = loader.sampler
    if shuffles(sampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)
    return type(sampler) is SequentialSampler and len(sampler) == len(loader.dataset)
