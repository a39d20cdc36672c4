"""The plain steps of one candidate are those of the others of its trial, unless they turn out to differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from checking import job

from saturn_airflow.launch.request import ChangesResultError, Measure, TrainRequest
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.estimates import Trial
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding import first_steps, guarded
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent


def asked_twice(a_job: Job, other: Job, ranks: Ranks) -> tuple[str, bool, str]:
    """The verdict by kept steps, whether none was taken for it, and what is said of another job by them."""
    request = TrainRequest(job=a_job, technique="ddp")
    kept = guarded.check(request, ranks)["plain_steps"]
    own, taken = first_steps.take, []
    first_steps.take = lambda *args, **kw: taken.append(0) or own(*args, **kw)  # type: ignore[func-returns-value]
    try:
        verdict = guarded.check(dataclasses.replace(request, plain_steps=kept), ranks)["guard"]
        guarded.check(dataclasses.replace(request, job=other, plain_steps=kept), ranks)
    except ChangesResultError as error:
        return verdict, not taken, str(error)
    finally:
        first_steps.take = own
    return verdict, not taken, ""


def test_kept_steps_stand_for_new_ones_and_find_what_differs() -> None:
    a_job, other = job(), job(hparams={"seed": 1})
    for verdict, none_taken, told in ranks_module.launch(asked_twice, a_job, other, size=2):
        assert verdict == "exact"
        assert none_taken
        assert told.startswith("not as plain steps taken before: the loss of step 1")


@pytest.mark.parametrize("model", ["odd_models:plain", "odd_models:other_each_time"])
def test_candidates_pass_where_weights_are_others_each_time(tmp_path: Path, model: str) -> None:
    from saturn_airflow.profiling.measure import measure

    a_job = job(load_model=model, hparams={"batches": 5, "batch_size": 7})
    told: list[str] = []
    estimate = measure(
        Trial(job=a_job, technique="loss_off", devices=1, node="here", covers=("cell",), fingerprint="f"),
        Node("here", devices=1, kind="cpu"),
        folder=tmp_path / "trial",
        leases_folder=str(tmp_path / "leases"),
        technique_folders=(str(HERE / "techniques"),),
        path=(str(HERE),),
        how=Measure(2, 2),
        log=told.append,
    )
    assert estimate.works
    compared = [line for line in told if line.startswith("Compared with one device")]
    assert len(compared) == 2
    assert all(line.endswith(": exact") for line in compared)
