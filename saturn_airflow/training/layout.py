"""Where the samples of a batch lie: along which dimension of which tensor, and in which lists.

A batch can be anything that is made of mappings, sequences, dataclasses and tensors. A path leads to a part
of it: the keys, positions and field names on the way there.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.nested import map_parts

Path = tuple[Any, ...]

ITEMS = "items"  # in the place of a dimension: a sequence with one item for each sample


class MicroBatch(NamedTuple):
    """One rank's share of a micro-batch.

    :param samples: how many samples of ``data`` count; 0 where ``data`` is a stand-in of one sample, there
        so that a rank without a share takes part in the collective operations.
    """

    data: Any
    samples: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the samples of some data's batches lie.

    :param places: the dimension that samples are counted along, or :data:`ITEMS`, by the path of each part
        that has samples. All other parts belong to every sample.
    :param obstacle: why such batches can't be cut; None where they can.
    """

    places: Mapping[Path, int | str]
    obstacle: str | None = None

    def count(self, data: Any) -> int:
        """The samples in a batch.

        :raises JobError: when nothing in it has samples.
        """
        for path, part in parts(data):
            if (place := self.places.get(path)) is not None:
                return _length(part, place, path)
        raise JobError("a batch holds no tensor, so Saturn can't tell how many samples it has")

    def left_of(self, data: Any, most: int) -> int:
        """The samples in a batch that was made of ``most``: fewer where those who made it left some out."""
        found = set()
        for path, part in parts(data):
            place = self.places.get(path)
            if isinstance(place, int) and _is_array(part) and part.ndim > place:
                found.add(int(part.shape[place]))
            elif place == ITEMS and isinstance(part, list | tuple):
                found.add(len(part))
        return found.pop() if len(found) == 1 and 0 < min(found) < most else most

    def take(self, data: Any, samples: int, rows: range) -> MicroBatch:
        """The samples ``rows`` of a batch of ``samples``; a stand-in where there are none.

        :raises DoesNotFit: when such batches can't be cut.
        """
        if rows == range(samples):
            return MicroBatch(data, samples)
        if self.obstacle is not None:
            raise DoesNotFit(f"{self.obstacle}, so its samples can't be shared out")
        chosen = rows or range(1)

        def cut(path: Path, part: Any) -> Any:
            place = self.places.get(path)
            if place is None:
                return part
            if (length := _length(part, place, path)) != samples:
                raise JobError(
                    f"{_name(path)} has {length} samples in a batch of {samples}; "
                    "say where its samples lie with Job(batch_dim=...)"
                )
            if place == ITEMS:
                items = part[chosen.start : chosen.stop]
                return items if isinstance(part, list) else type(part)(items)
            assert isinstance(place, int)
            if isinstance(part, torch.Tensor) and part.layout != torch.strided:
                return _rows_of_sparse(part, place, chosen)
            return part[(slice(None),) * place + (slice(chosen.start, chosen.stop),)]

        return MicroBatch(map_parts(cut, data, stop=lambda path: self.places.get(path) == ITEMS), len(rows))

    def shape(self, path: Path, part: torch.Tensor) -> list[int]:
        """The shape of a part of a batch, with -1 for lengths that may be others: the number of samples, and
        those of integers, such as tokens.
        """
        place = self.places.get(path)
        return [
            -1 if place == dim or not part.is_floating_point() else size
            for dim, size in enumerate(part.shape)
        ]


def of_collated(collate: Callable[[list[Any]], Any], sample: Any) -> Layout:
    """The layout of what ``collate`` makes of samples: whatever grows with their number.

    :raises JobError: when it makes nested tensors.
    """
    two, three = (collate([copy.deepcopy(sample) for _ in range(count)]) for count in (2, 3))
    _refuse_nested(two)
    places: dict[Path, int | str] = {}
    obstacles: list[str] = []

    def compare(path: Path, one: Any, other: Any) -> None:
        if _is_array(one) and _is_array(other):
            if one.shape == other.shape:
                return
            lengths = enumerate(zip(one.shape, other.shape, strict=False))
            grown = [(dim, sizes) for dim, sizes in lengths if sizes[0] != sizes[1]]
            if one.ndim == other.ndim and len(grown) == 1 and grown[0][1] == (2, 3):
                places[path] = grown[0][0]
                return
            obstacles.append(
                f"{_name(path)} is {tuple(one.shape)} for two samples and {tuple(other.shape)} for three, "
                "with no dimension that counts them"
            )
            return
        if isinstance(one, list | tuple) and (len(one), len(other)) == (2, 3):
            places[path] = ITEMS
            return
        for (key, ones), (_, others) in zip(_children(one), _children(other), strict=False):
            compare((*path, key), ones, others)

    compare((), two, three)
    return Layout(places, obstacles[0] if obstacles else None)


def of_batch(data: Any, batch_dim: int | Mapping[str, int | None] | None) -> Layout:
    """The layout of batches like ``data``, whose making can't be seen.

    :param batch_dim: what the job says of it; where it says nothing, samples lie along the first dimension of
        each tensor that is as long there as the first one.
    :raises JobError: when ``batch_dim`` names what is not there, or batches hold nested tensors.
    """
    _refuse_nested(data)
    told = batch_dim if isinstance(batch_dim, Mapping) else {}
    usual = batch_dim if isinstance(batch_dim, int) else 0
    found = list(parts(data))
    names = {_dotted(path) for path, _ in found}
    if unknown := [name for name in told if name not in names]:
        raise JobError(f"batch_dim names {unknown[0]!r}, which a batch does not have; it has {sorted(names)}")
    places: dict[Path, int | str] = {}
    samples: int | None = None
    for path, part in found:
        if any(places.get(path[:depth]) == ITEMS for depth in range(len(path))):
            continue
        name = _dotted(path)
        if _is_array(part) and part.ndim:
            place = told.get(name, usual if part.ndim > usual else 0)
            if place is None:
                continue
            if place >= part.ndim:
                raise JobError(f"batch_dim: {name!r} has {part.ndim} dimensions, so none numbered {place}")
            samples = part.shape[place] if samples is None else samples
            if part.shape[place] == samples or name in told:
                places[path] = place
        elif isinstance(part, list | tuple) and path and _is_per_sample(part, samples, told, path):
            places[path] = ITEMS
    if not places:
        return Layout(places, "a batch holds no tensor or list of samples that Saturn can see")
    packed = [path for path, part in found if isinstance(part, PackedSequence)]
    return Layout(places, f"{_name(packed[0])} is a packed sequence" if packed else None)


def parts(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in a batch, with its path, from the outside in."""
    yield path, data
    for key, child in _children(data):
        yield from parts(child, (*path, key))


def _refuse_nested(data: Any) -> None:
    """Nested tensors have no sizes to look at, and can't be cut, compared or kept as others are."""
    for path, part in parts(data):
        if isinstance(part, torch.Tensor) and part.is_nested:
            raise JobError(
                f"{_name(path)} is a nested tensor, which Saturn can't take apart; give a list with a tensor "
                "for each sample, of which the model makes the nested one, or pad them and give a mask"
            )


def _is_per_sample(part: Sequence[Any], samples: int | None, told: Mapping[str, Any], path: Path) -> bool:
    """Whether a sequence has one item for each sample: not where its items are tensors of many samples."""
    if _dotted(path) in told:
        return told[_dotted(path)] is not None
    if samples is None or len(part) != samples or hasattr(part, "_fields"):
        return False
    return not all(_is_array(item) and item.ndim and len(item) == samples for item in part)


def _children(data: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(data, Mapping):
        yield from data.items()
    elif isinstance(data, tuple) and hasattr(data, "_fields"):
        yield from zip(data._fields, data, strict=True)
    elif isinstance(data, list | tuple):
        yield from enumerate(data)
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        yield from ((f.name, getattr(data, f.name)) for f in dataclasses.fields(data))


def _rows_of_sparse(part: torch.Tensor, place: int, rows: range) -> torch.Tensor:
    """Some samples of a sparse tensor, in its own layout: torch cuts those of coordinates alone."""
    numbers = torch.arange(rows.start, rows.stop, device=part.device)
    cut: torch.Tensor = part.to_sparse(layout=torch.sparse_coo).index_select(place, numbers)
    return cut.to_sparse(layout=part.layout)


def _is_array(part: Any) -> bool:
    return isinstance(part, torch.Tensor | np.ndarray)


def _length(part: Any, place: int | str, path: Path) -> int:
    if place == ITEMS:
        return len(part)
    assert isinstance(place, int)
    if place >= part.ndim:
        raise JobError(f"{_name(path)} has {part.ndim} dimensions; samples should lie along number {place}")
    return int(part.shape[place])


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _name(path: Path) -> str:
    return f"{_dotted(path)!r} of a batch" if path else "a batch"
