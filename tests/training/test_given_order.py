"""Data that shuffle by a generator of their own come in the order in which a plain loop has them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from running import spec_for
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from saturn_airflow import HParams, Job, JobError
from saturn_airflow.launch import runs
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training.batches import Cut, Position
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.load_data import load_data
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.streams import Stream
from saturn_airflow.training.tables import Table

EPOCHS = 3


class Drawing(Dataset[torch.Tensor]):
    """Draws by the generator that shuffles it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand((), generator=self.generator, dtype=torch.float64) / 2


def numbers(
    seed: int | None = 5,
    size: int = 10,
    batch_size: int = 4,
    drop_last: bool = False,
    workers: int = 0,
    persistent: bool = False,
    sampler_alone: bool = False,
    split: bool = False,
    draws: bool = False,
) -> DataLoader[Any]:
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    data: Any = torch.arange(size)
    if split:
        data, _ = random_split(data, [size, 0], generator=generator)
    if draws:
        data = Drawing(generator)
    by_loader = {"shuffle": True, "generator": generator}
    order = {"sampler": RandomSampler(data, generator=generator)} if sampler_alone else by_loader
    more = {"num_workers": workers, "persistent_workers": persistent, "drop_last": drop_last}
    return DataLoader(data, batch_size=batch_size, **order, **more)  # type: ignore[arg-type]


def samples() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(22, 4, generator=generator), torch.randn(22, 1, generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator)


SHARED = torch.Generator()


def by(which: str = "default", draws: str = "order") -> DataLoader[Any]:
    """Samples that are shuffled, or chosen, by a generator that others draw by as well."""
    generator = torch.default_generator if which == "default" else SHARED.manual_seed(3)
    data = samples().dataset
    if draws == "choice":
        sampler = WeightedRandomSampler([1.0] * 22, 22, generator=generator)
        return DataLoader(data, batch_size=4, sampler=sampler)
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator)


class Noisy(nn.Linear):
    """Adds noise from the generator that its data are shuffled by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(1, generator=SHARED) if self.training else 0.0
        return super().forward(x) + noise


def noisy() -> nn.Module:
    torch.manual_seed(1)
    return Noisy(4, 1)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def job(**data_args: Any) -> Job:
    here = "test_given_order"
    return Job("j", f"{here}:model", f"{here}:numbers", data_args=data_args)


def batches(data: Any, start: Position, count: int) -> list[list[float]]:
    return [
        [float(n) for part, size in batch.micro_batches for n in list(part)[:size]]
        for batch in data.batches(start, Cut(), count)
    ]


def plain(loader: DataLoader[Any]) -> list[list[float]]:
    return [[float(n) for n in batch] for _ in range(EPOCHS) for batch in loader]


@settings(max_examples=40, deadline=None)
@given(
    facts=st.fixed_dictionaries(
        {
            "size": st.integers(4, 13),
            "batch_size": st.integers(1, 4),
            "drop_last": st.booleans(),
            "sampler_alone": st.booleans(),
            "split": st.booleans(),
        }
    ),
    share=st.floats(0, 1),
)
def test_the_order_is_that_of_a_plain_loop_wherever_training_resumes(
    facts: dict[str, Any], share: float
) -> None:
    expected = plain(numbers(**facts))
    one = job(**facts)
    data = load_data(one, one.load_dataloader)
    assert isinstance(data, Table)
    assert data.batches_per_epoch is not None
    assert batches(data, Position(), len(expected)) == expected
    at = int(share * (len(expected) - 1))
    fresh = load_data(one, one.load_dataloader)
    fresh.go_on(data.kept(Position()))
    for source in (data, fresh):
        assert batches(source, Position(*divmod(at, data.batches_per_epoch)), 1) == [expected[at]]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing(persistent: bool) -> None:
    facts = {"workers": 1, "persistent": persistent}
    one = job(**facts)
    expected = plain(numbers(**facts))  # type: ignore[arg-type]
    assert batches(load_data(one, one.load_dataloader), Position(), len(expected)) == expected


def test_what_draws_by_the_same_generator_is_run_through() -> None:
    one = job(draws=True)
    data = load_data(one, one.load_dataloader)
    assert isinstance(data, Stream)
    expected = plain(numbers(draws=True))
    assert batches(data, Position(), len(expected)) == expected


def test_a_checkpoint_has_the_order_that_training_began_with() -> None:
    """Also where the generator begins otherwise in each process; earlier versions took the job's seed."""
    one = job(seed=None)
    first, second = (load_data(one, one.load_dataloader) for _ in range(2))
    assert batches(first, Position(), 9) != batches(second, Position(), 9)
    second.go_on(first.kept(Position()))
    assert batches(first, Position(), 9) == batches(second, Position(), 9)
    second.go_on(None)
    other = job(seed=7)
    of_an_earlier_version = load_data(other, other.load_dataloader)
    of_an_earlier_version.go_on(None)
    assert batches(second, Position(), 9) == batches(of_an_earlier_version, Position(), 9)
    in_order = load_data(one, one.load_dataloader, in_order=True)
    assert list(itertools.chain(*batches(in_order, Position(), 3))) == list(range(10))


def test_what_data_of_another_kind_have_kept_is_left_alone() -> None:
    """A job that goes on under another definition may have data of its own now, or no longer."""
    by_index, run_through = (load_data(job(draws=d), job(draws=d).load_dataloader) for d in (False, True))
    kept = by_index.kept(Position()), run_through.kept(Position())
    assert isinstance(run_through, Stream)
    for data, of_the_other, draws in ((by_index, kept[1], False), (run_through, kept[0], True)):
        data.go_on(of_the_other)
        expected = plain(numbers(draws=draws))
        assert batches(data, Position(), len(expected)) == expected


def test_losses_are_those_of_a_plain_loop_however_often_training_is_stopped(tmp_path: Path) -> None:
    trained, expected = model().double(), []
    losses: dict[int, float] = {}
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    loader = samples()
    for inputs, targets in itertools.chain.from_iterable(loader for _ in range(EPOCHS)):
        found = loss(trained(inputs.double()), targets.double())
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(found.item())
    here, hparams = "test_given_order", HParams(precision="float64", lr=1e-2, epochs=EPOCHS)
    one = Job("j", f"{here}:model", f"{here}:samples", f"{here}:loss", hparams=hparams)
    for count in (4, 3, None):
        request = TrainRequest(job=one, technique="single", folder=str(tmp_path), batch_count=count)
        events: list[dict[str, Any]] = []
        train(request, Ranks(rank=0, size=1, device=torch.device("cpu"), _emit=events.append))
        losses |= {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, rel=1e-12)


def guard(one: Job) -> str:
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
    return str(check(TrainRequest(job=one, technique="single"), ranks)["guard"])


def by_job(which: str, draws: str = "order", **changes: Any) -> Job:
    here, given = "test_given_order", {"which": which, "draws": draws}
    references = {"load_model": f"{here}:model", "load_dataloader": f"{here}:by", **changes}
    return Job("j", loss_function=f"{here}:loss", data_args=given, **references)


def test_torch_s_own_generator_is_nobodys() -> None:
    """The job's seed shuffles; that each step draws by it as well changes nothing."""
    assert guard(by_job("default")) == "exact"


@pytest.mark.parametrize("draws", ["order", "choice"])
def test_a_generator_that_the_model_draws_by_as_well_is_refused(draws: str) -> None:
    with pytest.raises(JobError, match="load_dataloader and what is trained draw by one generator"):
        guard(by_job("shared", draws, load_model="test_given_order:noisy"))
    assert guard(by_job("shared", draws)) == "exact"


@pytest.mark.parametrize("draws", ["order", "choice"])
def test_a_generator_that_evaluation_draws_by_as_well_is_refused(draws: str) -> None:
    with pytest.raises(JobError, match="load_dataloader and load_eval_dataloader draw by one generator"):
        guard(by_job("shared", draws, load_eval_dataloader="test_given_order:by"))


def test_who_draws_by_it_later_is_noticed() -> None:
    one = by_job("shared")
    data = load_data(one, one.load_dataloader)
    next(iter(data.batches(Position(), Cut())))
    torch.rand(1, generator=SHARED)
    with pytest.raises(JobError, match="something else, such as the model, draws by the generator"):
        next(iter(data.batches(Position(1), Cut())))


@pytest.mark.ranks
def test_ranks_that_shuffle_otherwise_are_refused(tmp_path: Path) -> None:
    one = Job(
        "j",
        "test_given_order:model",
        "test_given_order:numbers",
        "test_given_order:loss",
        data_args={"seed": None},
        hparams=HParams(batches=4),
    )
    found = runs.start(spec_for(tmp_path, one, "ddp", 2, path=(str(Path(__file__).parent),))).wait()
    assert found["status"] == "failed"
    assert "shuffles by a generator that begins otherwise on each device" in found["reason"]
