"""What the host does within a step: it asks for all ahead, and reads what came of it at the end."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_jobs import loss, points
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, Subset

from saturn_airflow.launch.request import NotANumberError, TrainRequest
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ahead, job_training, loop, stepping
from saturn_airflow.training.ranks import Ranks

HERE = Ranks(rank=0, size=1, device=torch.device("cpu"))
said: list[str] = []


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one, and everything of interest noted in ``said``."""
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    said.clear()
    read, step = stepping._read, torch.optim.AdamW.step

    def noted_read(*args: Any) -> Any:
        said.append("read")
        return read(*args)

    def noted_step(self: Any, closure: Any = None) -> Any:
        said.append("step")
        return step(self, closure)

    each = job_training.each_of_the_job  # type: ignore[attr-defined]

    def noted_each(what: str, items: Iterator[Any]) -> Iterator[Any]:
        given = each(what, items)
        for number in itertools.count():
            said.append(f"fetch {number}")
            with torch._C.DisableTorchFunction():  # what is fetched is on the host
                fetched = next(given)
            yield fetched

    monkeypatch.setattr(job_training, "each_of_the_job", noted_each)
    monkeypatch.setattr(ahead, "pays", lambda job, device: job.on_step is None)  # as on a GPU
    monkeypatch.setattr(stepping, "_read", noted_read)
    monkeypatch.setattr(torch.optim.AdamW, "step", noted_step)
    yield
    dist.destroy_process_group()


class Damaged(Dataset[Any]):
    """Eight samples, of which the last can't be had."""

    def __init__(self) -> None:
        self._samples = points().dataset

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise ValueError("this sample is damaged")
        return self._samples[index]


class Counts(Damaged):
    """Samples that depend on how many were fetched before."""

    fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        x, y = self._samples[index]
        return x + self.fetched, y


def eight(kind: str = "") -> DataLoader[Any]:
    whole = Subset(points().dataset, range(8))
    return DataLoader({"": whole, "damaged": Damaged(), "counts": Counts()}[kind], batch_size=2)


def pairs(outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that says what it is a sum over."""
    return loss(outputs, targets) * len(targets), torch.tensor(len(targets))


def without_end(outputs: Any, targets: Any) -> torch.Tensor:
    return loss(outputs, targets) * float("inf")


def trained(
    loss_function: str = "loop_jobs:loss", on_step: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Train for an epoch: what was told of each step."""
    job = Job(
        "j",
        "loop_jobs:line",
        "test_stepping:eight",
        loss_function,
        hparams=HParams(lr=0.1, optimizer="torch.optim:AdamW", clip_grad_norm=1.0),
        data_args=options,
        on_step=on_step,
    )
    told: list[dict[str, Any]] = []
    request = TrainRequest(job=job, technique="single")
    training = loop.make_training(request, dataclasses.replace(HERE, _emit=told.append))
    said.clear()
    training.run()
    return [event for event in told if event["event"] == "step"]


def test_the_next_batch_is_fetched_before_anybody_waits_for_this_one() -> None:
    trained()
    one = ["step", "read"]
    assert said == ["fetch 0", "fetch 1", *one, "fetch 2", *one, "fetch 3", *one, *one]


def test_what_a_loss_is_a_sum_over_is_not_waited_for() -> None:
    trained("test_stepping:pairs")
    assert [what for what in said if "fetch" not in what] == 4 * ["step", "read"]


def test_where_samples_depend_on_those_before_nothing_is_fetched_ahead() -> None:
    trained(kind="counts")
    assert said == [what for number in range(4) for what in (f"fetch {number}", "step", "read")]


def after_a_step(told: dict[str, Any]) -> None:
    said.append("told")


def test_where_the_job_hears_of_its_steps_nothing_is_fetched_before_it_did() -> None:
    trained(on_step="test_stepping:after_a_step")
    assert said == [what for number in range(4) for what in (f"fetch {number}", "step", "read", "told")]


def test_a_cpu_has_nothing_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not ahead.pays(Job("j", "m:m", "m:d", "m:l"), HERE.device)


@pytest.mark.parametrize(
    ("tensor", "goes"),
    [
        (torch.zeros(3), True),
        (torch.zeros(3, device="meta"), False),  # on a device, that is
        (torch.zeros(3).to_sparse(), False),
        (nn.Parameter(torch.zeros(3)), False),
    ],
    ids=["dense", "on a device", "sparse", "of a class of its own"],
)
def test_batches_are_copied_beside_others_from_the_host_alone(tensor: torch.Tensor, goes: bool) -> None:
    assert ahead.lies_on_host({"x": [torch.ones(1), tensor]}) is goes


def test_a_batch_that_fails_is_told_when_it_is_its_turn() -> None:
    with pytest.raises(JobError, match="this sample is damaged"):
        trained(kind="damaged")
    one = ["step", "read"]
    assert said == ["fetch 0", "fetch 1", *one, "fetch 2", *one, "fetch 3", *one]


def test_a_loss_that_is_no_number_is_told_whatever_the_optimizer_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Any, closure: Any = None) -> None:
        raise ValueError("gradients are not finite")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(NotANumberError, match="loss is inf at step 1"):
        trained("test_stepping:without_end")


WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__")


class Waits(TorchFunctionMode):
    """Notes what would make the host wait for a GPU, as far as Python asks for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITS:
            said.append("wait")
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The same, as far as torch asks for it itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            said.append("wait")
        return func(*args, **(kwargs or {}))


def test_nobody_waits_between_forward_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    take = stepping.take

    def watched(training: Any, *args: Any) -> Any:
        said.append(f"begin {training.step}")
        with Waits(), Reads():  # type: ignore[no-untyped-call]
            return take(training, *args)

    monkeypatch.setattr(stepping, "take", watched)
    trained()
    # In the first step it is looked at what the model does.
    later = said[said.index("begin 1") :]
    begun = [n for n, what in enumerate(later) if what.startswith("begin")]
    for number in begun:
        assert "wait" not in later[number : later.index("step", number)]
    assert "wait" in later  # for the loss, at the end
