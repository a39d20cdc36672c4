"""What of a job is no state of its own: attributes that list weights, and what is installed."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from saturn_airflow.training.model_attributes import ModelAttributes, put
from saturn_airflow.training.optim import own_classes, plain_values

CPU = torch.device("cpu")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 2)


def stand_ins(model: Recurrent) -> list[torch.Tensor]:
    return [torch.full_like(weight, math.nan).detach() for weight in model.cell.parameters()]


def test_stand_ins_of_weights_are_not_kept() -> None:
    model = Recurrent()
    model.cell._flat_weights = stand_ins(model)  # type: ignore[assignment]
    assert ModelAttributes(model, CPU).values() == ({}, {})


def test_stand_ins_that_a_checkpoint_has_leave_the_weights_as_they_are() -> None:
    model = Recurrent()
    put(model, {"cell": {"_flat_weights": plain_values.encode(stand_ins(model), "it")}}, CPU)
    assert all(map(torch.equal, model.cell._flat_weights, model.cell.parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "dags"])
def test_packages_are_no_code_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    name = f"of_{folder.partition('-')[0]}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{name}.py").write_text("COUNT = 0")
    monkeypatch.syspath_prepend(tmp_path / folder)
    importlib.import_module(name)
    assert own_classes.is_own(name) is (folder == "dags")


def test_modules_and_functions_that_take_the_place_of_others_are_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model.act, model.same = torch.tanh, torch.tanh  # type: ignore[assignment]
    attributes = ModelAttributes(model, CPU)
    assert attributes.values() == ({}, {})
    model[1], model.act = nn.Sigmoid(), torch.relu  # type: ignore[assignment]
    model.append(nn.Linear(2, 2))
    _, why_not = attributes.values()
    assert why_not.keys() == {"1", "2", "act"}
    assert why_not["1"].startswith("it was a Tanh, and is a Sigmoid by now")
    assert why_not["2"].startswith("it was not there, and is a Linear by now")


class OfNoLength(tuple[int, ...]):
    """As e3nn's irreps are."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_what_has_no_length_is_kept_as_it_is() -> None:
    model = nn.Linear(1, 1)
    model.irreps = OfNoLength((1, 2))  # type: ignore[assignment]
    assert ModelAttributes(model, CPU).values() == ({}, {})


def test_a_tensor_in_the_memory_of_the_host_stays_there_when_its_job_goes_on() -> None:
    """Beside a model on a GPU, for which the device without data stands in."""
    gpu = torch.device("meta")
    model, another = nn.Linear(2, 2), nn.Linear(2, 2)
    model.seen = another.seen = None  # type: ignore[assignment]
    attributes = ModelAttributes(model, gpu)
    model.seen = torch.ones(2)
    put(another, attributes.values()[0], gpu)
    assert torch.equal(another.seen, torch.ones(2))  # type: ignore[arg-type]
    # Where all is on a CPU, one may go with the model to a GPU.
    model.seen = None  # type: ignore[assignment]
    on_cpu = ModelAttributes(model, CPU)
    model.seen = torch.ones(2)
    put(another, on_cpu.values()[0], gpu)
    assert another.seen.device == gpu


class Longer(nn.Module):
    """Has frequencies that may be replaced, as those of transformers' dynamic RoPE."""

    now: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.ones(2), persistent=False)
        self.first = self.now


@pytest.mark.parametrize("written", [True, False])
def test_what_a_buffer_took_the_place_of_stays_where_a_job_goes_on(written: bool) -> None:
    model, another = Longer(), Longer()
    attributes = ModelAttributes(model, CPU)
    model.now = model.now.clone()
    assert attributes.values() == ({}, {})
    model = Longer()
    attributes = ModelAttributes(model, CPU)
    if written:
        model.now.fill_(2)
    else:
        model.now = torch.full((2,), 2.0)
    put(another, attributes.values()[0], CPU)
    assert torch.equal(another.now, torch.full((2,), 2.0))
    assert (another.first is another.now) == written
    assert torch.equal(another.first, model.first)
    assert not another.state_dict()
