"""The plain steps of one technique's trial are those of another's, and nothing passes because of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checking import job

from saturn_airflow.launch.request import Measure
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.jobs import Job
from saturn_airflow.profiling.measure import measure
from saturn_airflow.training.guarding import kept_steps
from saturn_airflow.training.guarding.first_steps import PlainSteps
from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.plain_files import PlainFile
from saturn_airflow.training.guarding.samples import samples, singles

HERE = Path(__file__).parent


def spec(folder: Path, technique: str = "ddp", devices: int = 2, a_job: Job | None = None) -> RunSpec:
    return RunSpec(
        job=a_job or job(),
        technique=technique,
        folder="f",
        node="n",
        slots=4,
        devices=devices,
        kind="cpu",
        plain_steps_folder=str(folder),
    )


def test_others_on_the_same_samples_find_what_one_left(tmp_path: Path) -> None:
    PlainFile(spec(tmp_path)).write(b"steps")
    same = [
        spec(tmp_path, "fsdp"),
        spec(tmp_path, "spill", 1),
        spec(tmp_path, a_job=job(hparams={"lr": 7.0})),
    ]
    assert [PlainFile(one).read() for one in same] == [b"steps"] * 3
    others = [
        spec(tmp_path, "single", 1),
        spec(tmp_path, devices=3),
        spec(tmp_path, a_job=job(hparams={"seed": 1})),
    ]
    others += [
        spec(tmp_path, a_job=job(hparams=changed))
        for changed in (
            {"batch_size": 5},
            {"accumulate": 2},
            {"precision": "float32"},
            {"optimizer_args": {"eps": 1e-3}},
        )
    ]
    others += [
        dataclasses.replace(spec(tmp_path), kind="h200"),
        spec(tmp_path, a_job=job(model_args={"wide": 3})),
    ]
    assert [PlainFile(one).read() for one in others] == [b""] * len(others)


def test_jobs_that_say_no_hyper_parameters_have_a_file_too(tmp_path: Path) -> None:
    bare = Job("bare", load_model="shop:trainer", trainer=True)
    PlainFile(spec(tmp_path, a_job=bare)).write(b"steps")
    assert PlainFile(spec(tmp_path, a_job=bare)).read() == b"steps"


def test_what_was_forgotten_is_kept_no_more(tmp_path: Path) -> None:
    PlainFile(spec(tmp_path)).write(b"steps")
    PlainFile(spec(tmp_path)).forget()
    PlainFile(spec(tmp_path)).write(b"others")
    assert PlainFile(spec(tmp_path)).read() == b""


def test_steps_are_read_as_they_were_written_or_not_at_all() -> None:
    tensors = {"a": torch.randn(3000), "b": torch.arange(5), "c": None}
    values = singles({"a": torch.randn(3000)})
    found_there = samples(tensors)
    step = Step(1.5, None, found_there, values, values, found_there, frozenset("a"), {"x": 3})
    step = dataclasses.replace(step, clip=0.5, unclipped=found_there)
    plain = PlainSteps((3, 1), "cpu", {2}, [step], torch.float32, True, [1.0], 0.5, True, [0.25])
    written = kept_steps.dumped(plain)
    again = kept_steps.loaded(written)
    assert again is not None
    assert dataclasses.replace(again, steps=[]) == dataclasses.replace(plain, steps=[])
    (found,) = again.steps
    assert (found.loss, found.counted, found.stateful, found.counts) == (1.5, None, frozenset("a"), {"x": 3})
    assert found.gradients["c"] is None
    assert found.clip == 0.5
    assert found.unclipped["b"].distance(found_there["b"]) == 0  # type: ignore[union-attr,arg-type]
    assert all(found.gradients[name].distance(step.gradients[name]) == 0 for name in "ab")  # type: ignore[union-attr,arg-type]
    assert torch.equal(found.before["a"], values["a"])
    for damaged in (written[:500], written[:200] + b"zz" + written[202:], b"x"):
        assert kept_steps.loaded(damaged) is None


def tried(folder: Path, technique: str, **changes: Any) -> Estimate:
    return measure(
        Trial(
            job=job(**changes), technique=technique, devices=1, node="here", covers=("cell",), fingerprint="f"
        ),
        Node("here", devices=1, kind="cpu"),
        folder=folder / technique,
        plain_steps=folder / "plain steps",
        leases_folder=str(folder / "leases"),
        technique_folders=(str(HERE / "techniques"),),
        path=(str(HERE),),
        how=Measure(1, 2),
    )


@pytest.mark.ranks
def test_a_wrong_technique_is_refused_by_the_steps_of_another(tmp_path: Path) -> None:
    assert tried(tmp_path, "spill", hparams={"batches": 5, "batch_size": 5}).works
    (file,) = (tmp_path / "plain steps").iterdir()
    written = file.read_bytes()
    estimate = tried(tmp_path, "loss_off", hparams={"batches": 5, "batch_size": 5})
    assert estimate.reason is not None
    assert estimate.reason.startswith("loss_off x 1 changes the result: the loss of step 1 is")
    assert (
        [file.read_bytes()] == [one.read_bytes() for one in (tmp_path / "plain steps").iterdir()] == [written]
    )


@pytest.mark.ranks
def test_what_is_right_passes_whatever_another_left(tmp_path: Path) -> None:
    assert tried(tmp_path, "spill", hparams={"batches": 5, "seed": 1}).works
    (others,) = (tmp_path / "plain steps").iterdir()
    file = Path(PlainFile(spec(tmp_path / "plain steps", a_job=job(hparams={"batches": 5}))).path or "")
    file.write_bytes(others.read_bytes())
    estimate = tried(tmp_path, "loss_off", hparams={"batches": 5})
    assert estimate.works
    assert estimate.parameters == {"off": 0.0}
    assert not file.read_bytes(), "the steps were not looked at"
