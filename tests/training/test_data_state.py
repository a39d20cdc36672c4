"""Data whose objects keep something: the same batches in a plain loop, in a training, and in a resumed one.

The plain loop is torch's DataLoader alone, told the epoch as training loops tell it.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stateful_data import (
    BATCH,
    SIZE,
    AtOnce,
    ByEpoch,
    ByRow,
    Caches,
    Counts,
    CountsInModule,
    CountsTogether,
    Draws,
    DrawsLate,
    DrawsOfModule,
    Grows,
    GrowsByItself,
    InPlace,
    Longer,
    Mixes,
    ReadsOn,
    Rows,
    Seeks,
    WithCycle,
    WithIterator,
    collate_with,
    files,
    fresh,
    g,
    mixed,
    selected,
    shift,
)
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.batches import Cut, Data, Position
from saturn_airflow.training.data_state import DataState
from saturn_airflow.training.load_data import load_data
from saturn_airflow.training.tables import Table

pytestmark = pytest.mark.slow

EPOCHS = 3


LOADERS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: DataLoader(
        Rows(), BATCH, sampler=WeightedRandomSampler([1.0] * SIZE, 7, generator=g())
    ),
    "subset": lambda: DataLoader(Rows(), BATCH, sampler=SubsetRandomSampler(range(5), generator=g())),
    "with replacement": lambda: DataLoader(
        Rows(), BATCH, sampler=RandomSampler(Rows(), True, 8, generator=g())
    ),
    "batches of torch": lambda: DataLoader(
        Rows(), batch_sampler=BatchSampler(SubsetRandomSampler(range(SIZE), generator=g()), 2, True)
    ),
    "told the epoch": lambda: DataLoader(Rows(), BATCH, sampler=ByEpoch(counts=False)),
    "counts epochs": lambda: DataLoader(Rows(), BATCH, sampler=ByEpoch(counts=True)),
    "in place": lambda: DataLoader(Rows(), BATCH, sampler=InPlace(random.Random(1)), drop_last=True),
    "in place, numpy": lambda: DataLoader(Rows(), BATCH, sampler=InPlace(np.random.default_rng(1))),
    "draws, numpy": lambda: DataLoader(Draws(np.random.default_rng(3)), BATCH),
    "draws, numpy's old": lambda: DataLoader(Draws(np.random.RandomState(3)), BATCH),
    "draws, python": lambda: DataLoader(Subset(Draws(random.Random(3)), range(5)), BATCH),
    "draws, torch": lambda: DataLoader(Draws(g()), BATCH),
    "counts calls": lambda: DataLoader(Counts(), BATCH),
    "mixes": lambda: DataLoader(Mixes(), BATCH),
    "grows": lambda: DataLoader(Grows(), BATCH),
    "worker's dataset": lambda: DataLoader(Rows(), BATCH, num_workers=2, worker_init_fn=shift),
    "files": lambda: DataLoader(files(), BATCH),
    "files, two workers": lambda: DataLoader(files(), BATCH, num_workers=2),
    "files, workers that stay": lambda: DataLoader(files(), BATCH, num_workers=2, persistent_workers=True),
    "files as tuples": lambda: DataLoader(files(as_tuples=True), BATCH),
    "files in a chain": lambda: DataLoader(ChainDataset([files(), files()]), BATCH),
    "an iterator": lambda: DataLoader(WithIterator(), BATCH),
    "an open file": lambda: DataLoader(ByRow(), BATCH),
    "an open file as an iterator": lambda: DataLoader(ReadsOn(iter), BATCH),
    "a reader of a file": lambda: DataLoader(ReadsOn(csv.reader), BATCH),
    "a database": lambda: DataLoader(ReadsOn(selected), BATCH),
    "counts for all processes": lambda: DataLoader(CountsTogether(), BATCH),
    "samples fetched at once": lambda: DataLoader(AtOnce(), BATCH),
    "the first samples": lambda: DataLoader(Rows(), BATCH, sampler=SequentialSampler(range(4))),
    "an endless cycle": lambda: DataLoader(WithCycle(iter), BATCH),
    "a cycle within": lambda: DataLoader(WithCycle(lambda noise: map(abs, noise)), BATCH),
    "longer than it says": lambda: DataLoader(Longer(), BATCH),
    "draws, of the module": lambda: fresh(DrawsOfModule()),
    "draws, of the module, by batches": lambda: fresh(Rows(), collate_fn=mixed),
    "counts in the module": lambda: fresh(CountsInModule()),
    "counts in the module, two workers": lambda: fresh(CountsInModule(), num_workers=2),
    "collate": lambda: DataLoader(files(), BATCH, collate_fn=collate_with(np.random.default_rng(9))),
}


def loader(name: str) -> Any:
    return LOADERS[name]()


def loaded(name: str) -> Data:
    job = Job("j", "x:y", "test_data_state:loader", hparams=HParams(), data_args={"name": name})
    return load_data(job, job.load_dataloader)


def plain(name: str) -> list[list[float]]:
    own, found = loader(name), []
    for epoch in range(EPOCHS):
        for part in (own.sampler, own.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        found += [batch.tolist() for batch in own]
    return found


def taken(data: Data, start: Position, shares: int = 1, share: int = 0) -> list[tuple[Position, list[float]]]:
    found: list[Any] = []
    for batch in data.batches(start, Cut(1, share, shares)):
        if batch.position.epoch == EPOCHS:
            return found
        ((numbers, count),) = batch.micro_batches
        found.append((batch.position, numbers[:count].tolist()))
    raise AssertionError


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_a_plain_loop(name: str) -> None:
    assert [numbers for _, numbers in taken(loaded(name), Position())] == plain(name)


@pytest.mark.parametrize("name", LOADERS)
def test_looking_ahead_changes_nothing(name: str) -> None:
    data = loaded(name)
    data.first()
    list(data.few([2, 1]).batches(Position(), Cut(), 2))
    list(data.whole(0, 2, 2))
    with data.aside():
        next(data.batches(Position(), Cut(2), 1))
    assert data.layout is not None
    parts = [taken(data, Position(), 2, 0), taken(loaded(name), Position(), 2, 1)]
    joined = [one + other for (_, one), (_, other) in zip(*parts, strict=True)]
    assert joined == plain(name)


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_run_through_is_put_back(name: str) -> None:
    own = loader(name)
    state = DataState(own)
    with state.put_back() as is_back:
        list(own)
    # A counter that was the class's is the object's own by then.
    lost = ["an iterator", "an endless cycle", "a cycle within", "counts calls"]
    lost += ["a reader of a file", "a database"]
    assert is_back() == (name not in lost)


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_resumed_goes_on_with_the_same_batches(name: str) -> None:
    whole = taken(loaded(name), Position())
    # The end of the first epoch, the middle of the second, and one that was resumed before.
    kept: dict[int, Any] = {}
    data = loaded(name)
    for batch in data.batches(Position(), Cut()):
        number = len(kept)
        next_one = (
            Position(batch.position.epoch + 1)
            if batch.ends_epoch
            else Position(batch.position.epoch, batch.position.batch + 1)
        )
        kept[number] = (next_one, data.kept(next_one))
        if number + 2 == len(whole):
            break
    for number in (0, len(whole) // 2, len(whole) - 2):
        position, said = kept[number]
        resumed = loaded(name)
        resumed.go_on(said)
        resumed.first()
        assert taken(resumed, position) == whole[number + 1 :]


@pytest.mark.parametrize(
    "own",
    [Rows(), Caches(), Subset(Rows(), range(5)), Seeks()],
    ids=["rows", "caches", "a subset", "an open file"],
)
def test_samples_that_stand_alone_are_fetched_by_whom_they_are_for(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOADERS, "this", lambda: DataLoader(own, BATCH, shuffle=True))
    assert isinstance(loaded("this"), Table)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_is_drawn_otherwise_than_the_ones_that_were_tried_is_refused(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DrawsLate(np.random.default_rng(3))
    monkeypatch.setitem(LOADERS, "this", lambda: DataLoader(own, BATCH, num_workers=workers))
    with pytest.raises(JobError, match="not the ones that were tried, by a random generator of its own"):
        taken(loaded("this"), Position())


@pytest.mark.parametrize("generator", [random.random.__self__, np.random.mtrand._rand])  # type: ignore
def test_who_holds_a_global_generator_draws_by_no_other(
    generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOADERS, "this", lambda: DataLoader(DrawsLate(generator), BATCH))
    data = loaded("this")
    assert isinstance(data, Table)
    assert len(taken(data, Position())) == EPOCHS * 3


def test_data_that_become_more_as_they_are_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "this", lambda: DataLoader(GrowsByItself(), BATCH))
    with pytest.raises(JobError, match="has 8 samples when epoch 1 begins, and had 7 at first"):
        taken(loaded("this"), Position())


def without_threes(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([row for row in rows if row % 3 or len(rows) == 1])


def test_samples_that_are_left_out_of_a_batch_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOADERS, "this", lambda: DataLoader(Rows(), BATCH, collate_fn=without_threes))
    data = loaded("this")
    assert isinstance(data, Table)
    found = [next(data.batches(Position(), Cut(2, share, 2), 1)) for share in (0, 1)]
    assert [batch.samples for batch in found] == [2, 2]
    assert [[part.samples for part in batch.micro_batches] for batch in found] == [[1, 1], [0, 0]]
    assert [part.data.tolist() for part in found[0].micro_batches] == [[1.0], [2.0]]
    assert data.first().samples == 2
    whole = itertools.islice(data.batches(Position(), Cut()), 3)
    assert [batch.samples for batch in whole] == [2, 2, 1]


SHOP = """
import torch
from torch.utils.data import DataLoader, Dataset

_draw = torch.Generator().manual_seed(1)


class Noisy(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand((), generator=_draw)


def batches():
    return DataLoader(Noisy(), 2)
"""


def test_what_an_installed_package_of_the_jobs_keeps_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a_shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(references, "packages", set())
    a_job = Job("a", "m:model", "a_shop:batches")
    data = load_data(a_job, a_job.load_dataloader)
    data.first()
    draw = torch.Generator().manual_seed(1)
    plainly = [torch.rand(1, generator=draw).item() for _ in range(EPOCHS * 4)]
    assert [number for _, numbers in taken(data, Position()) for number in numbers] == plainly
