"""Where samples lie in a batch: found by what grows with their number, or told by the job."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.errors import InvalidSweepError, JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.training import layout
from saturn_airflow.training.batches import Cut, Data, Position
from saturn_airflow.training.layout import ITEMS, of_batch, of_collated
from saturn_airflow.training.load_data import load_data


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Labelled:
    frames: Any
    names: Any


def time_first(samples: list[torch.Tensor]) -> Any:
    return {"frames": torch.stack(samples, dim=1), "table": torch.arange(2), "y": torch.zeros(len(samples))}


SAMPLE = torch.arange(4.0)


@pytest.mark.parametrize(
    ("collate", "places"),
    [
        (default_collate, {(): 0}),
        (time_first, {("frames",): 1, ("y",): 0}),
        (lambda s: Pair(torch.stack(s), [str(each) for each in s]), {("x",): 0, ("y",): ITEMS}),
        (lambda s: Labelled(torch.stack(s, dim=-1), "all"), {("frames",): 1}),
        (lambda s: [torch.stack(s), (torch.stack(s),) * 2], {(0,): 0, (1, 0): 0, (1, 1): 0}),
        (lambda s: tuple(zip(*[(each, {"n": 1}) for each in s], strict=True)), {(0,): ITEMS, (1,): ITEMS}),
    ],
)
def test_samples_lie_where_their_number_shows(collate: Any, places: Any) -> None:
    layout = of_collated(collate, SAMPLE)
    assert layout.places == places
    assert layout.obstacle is None
    whole, parts = collate([SAMPLE + n for n in range(2)]), [collate([SAMPLE + n]) for n in range(2)]
    for row, part in enumerate(parts):
        taken = layout.take(whole, 2, range(row, row + 1))
        assert taken.samples == 1
        torch.testing.assert_close(_flat(taken.data), _flat(part))


def _flat(data: Any) -> list[Any]:
    return [part for _, part in layout.parts(data) if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(
    "collate",
    [
        lambda s: {"tokens": torch.cat(s)[None], "all": torch.stack(s)},
        lambda s: torch.eye(len(s)),
        lambda s: pack_sequence([each[:, None] for each in s]),
    ],
)
def test_what_has_no_place_for_samples_can_not_be_cut(collate: Any) -> None:
    layout = of_collated(collate, SAMPLE)
    data = collate([SAMPLE] * 3)
    assert layout.take(data, 3, range(3)).data is data
    with pytest.raises(DoesNotFit, match=r"for two samples and .* for three, with no dimension"):
        layout.take(data, 3, range(2))


def test_a_packed_sequence_can_not_be_cut() -> None:
    layout = of_batch({"x": pack_sequence([SAMPLE, SAMPLE])}, None)
    with pytest.raises(DoesNotFit, match=r"'x' of a batch is a packed sequence"):
        layout.take({}, 2, range(1))


@pytest.mark.parametrize("kind", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused(kind: torch.layout) -> None:
    def collate(samples: list[Any]) -> Any:
        return [torch.nested.nested_tensor(samples, layout=kind)]

    with pytest.raises(JobError, match=r"'0' of a batch is a nested tensor, .*; give a list with a tensor"):
        of_collated(collate, SAMPLE)
    with pytest.raises(JobError, match=r"'0' of a batch is a nested tensor"):
        of_batch(collate([SAMPLE, SAMPLE]), None)


def test_a_job_says_where_samples_lie() -> None:
    data = {
        "x": torch.zeros(7, 3, 2),
        "y": torch.zeros(3),
        "table": torch.zeros(7, 3),
        "names": ["a", "b", "c"],
    }
    assert of_batch(data, 1).places == {("x",): 1, ("y",): 0, ("table",): 1, ("names",): ITEMS}
    told = of_batch(data, {"x": 1, "table": None})
    assert told.places == {("x",): 1, ("y",): 0, ("names",): ITEMS}
    assert of_batch(data, None).places == {("x",): 0, ("table",): 0}
    with pytest.raises(JobError, match=r"batch_dim names 'z', which a batch does not have"):
        of_batch(data, {"z": 1})
    with pytest.raises(JobError, match="'y' has 1 dimensions, so none numbered 2"):
        of_batch(data, {"y": 2})


def test_another_length_than_that_of_the_batch_is_noticed() -> None:
    layout = of_batch({"x": torch.zeros(3, 2), "table": torch.zeros(3)}, None)
    with pytest.raises(JobError, match=r"'table' of a batch has 3 samples in a batch of 2; .*batch_dim"):
        layout.take({"x": torch.zeros(2, 2), "table": torch.zeros(3)}, 2, range(1))


def masked(batch_size: int = 4, num_workers: int = 0) -> Any:
    """Samples of other lengths, padded and masked by a function of their own."""
    rows = [torch.full((1 + n % 5,), n) for n in range(10)]

    def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)
        return {"ids": ids, "masked": torch.rand(ids.shape) < 0.5}

    return torch.utils.data.DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=True,
        collate_fn=collate,
        num_workers=num_workers,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_masks_and_padding_are_those_of_the_global_batch(workers: int) -> None:
    def load(**data_args: Any) -> Data:
        job = Job("j", "x:y", "test_layout:masked", data_args=data_args)
        return load_data(job, job.load_dataloader)

    whole = list(load().batches(Position(), Cut(), 6))
    for shares in (2,) if workers else (2, 3):
        for start in (2,) if workers else (0, 2, 4):
            position = Position(*divmod(start, 3))
            parts = [
                list(load(num_workers=workers).batches(position, Cut(2, share, shares), 6 - start))
                for share in range(shares)
            ]
            for expected, *cut in zip(whole[start:], *parts, strict=True):
                micro_batches = [
                    m for each in zip(*(c.micro_batches for c in cut), strict=True) for m in each
                ]
                for name, tensor in expected.micro_batches[0].data.items():
                    joined = torch.cat([m.data[name][: m.samples] for m in micro_batches])
                    assert torch.equal(joined, tensor)


def test_jobs_name_a_dimension_and_coupled_samples() -> None:
    job = Job("j", "x:y", "x:z", batch_dim={"x": 1, "table": None}, couples_batch=True)
    assert Job.from_dict(job.to_dict()) == job
    assert "couples_batch" not in Job("j", "x:y", "x:z").to_dict()
    assert len({fingerprint(Job("j", "x:y", "x:z", couples_batch=flag)) for flag in (False, True)}) == 2
    for wrong in (-1, 1.5, True, "x", {"x": -1}, {"x": "y"}):
        with pytest.raises(InvalidSweepError, match=r"batch_dim is .*; give the number of a dimension"):
            Job("j", "x:y", "x:z", batch_dim=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidSweepError, match="couples_batch is 1; it must be True or False"):
        Job("j", "x:y", "x:z", couples_batch=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidSweepError, match=r"accumulate=2 cuts a batch whose samples are coupled"):
        Job("j", "x:y", "x:z", couples_batch=True, hparams=HParams(accumulate=2))
