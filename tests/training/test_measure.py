"""Trials: what they measure, and which ways of failing are answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import USERLAND, small_job

from saturn_airflow.launch import leases
from saturn_airflow.launch.request import Measure
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.core_use import CoreUse
from saturn_airflow.model.errors import JobError, SaturnError
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.profiling.blame import measured_with_any
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.measure import _followed, measure

pytestmark = pytest.mark.ranks


def run(
    tmp_path: Path,
    job: Job,
    technique: str = "single",
    devices: int = 1,
    node: Node | None = None,
    **how: Any,
) -> Estimate:
    trial = Trial(
        job=job, technique=technique, devices=devices, node="local", covers=(job.name,), fingerprint="abc"
    )
    try:
        return measure(
            trial,
            node or Node("local", devices=2, kind="cpu"),
            folder=tmp_path / "trial",
            leases_folder=str(tmp_path / "leases"),
            technique_folders=(str(USERLAND / "techniques"),),
            path=(str(USERLAND),),
            **how,
        )
    finally:
        assert leases.holders(tmp_path / "leases") == {}


def test_a_trial_on_a_stream_with_workers(tmp_path: Path) -> None:
    job = dataclasses.replace(small_job(), load_dataloader="small_jobs:stream")
    estimate = run(tmp_path, job, "fsdp", devices=2, how=Measure(1, 2))
    assert estimate.reason is None
    assert list(estimate.verdicts.values()) == ["exact"]


def test_a_trial_measures_what_training_does(tmp_path: Path) -> None:
    uses: list[CoreUse] = []
    estimate = run(tmp_path, small_job("slow"), "ddp", devices=2, how=Measure(1, 4), on_use=uses.append)
    assert estimate.reason is None
    assert (estimate.fingerprint, estimate.technique, estimate.devices) == ("abc", "ddp", 2)
    assert (estimate.kind, estimate.source) == ("cpu", "measured")
    assert estimate.seconds_per_batch >= 0.02, "the loss sleeps that long"
    assert estimate.setup_seconds > 0
    assert (estimate.batches, estimate.batches_per_epoch) == (4, 500)
    assert estimate.peak_host_bytes > estimate.peak_device_bytes > 0
    assert not (tmp_path / "trial" / "checkpoints").exists(), "a trial leaves nothing to resume from"
    assert Estimate.from_dict(estimate.to_dict()) == estimate
    (use,) = uses
    assert use.ended > use.began
    assert use.busy_after - use.busy_before >= use.of_run > 0
    assert 0 < use.of_rank < 1, "the loss sleeps"


def test_what_loading_takes_of_the_hosts_memory_counts(tmp_path: Path) -> None:
    job = dataclasses.replace(small_job(), load_model="small_jobs:heavy_to_load")
    estimate = run(tmp_path, job, how=Measure(1, 2))
    assert estimate.peak_host_bytes > 1 << 30


def test_short_batches_are_counted_for_longer(tmp_path: Path) -> None:
    assert run(tmp_path, small_job()).batches > 20


def test_a_speed_that_varies_is_known_by_its_mean_and_its_spread(tmp_path: Path) -> None:
    estimate = run(tmp_path, small_job("uneven"))
    # Every third batch counts in what all of them take; the median would be a third of that.
    assert estimate.seconds_per_batch >= 0.03
    assert estimate.spread > 0.5
    assert estimate.batches * estimate.seconds_per_batch > 2, "more of them are looked at"


def test_evaluating_is_part_of_what_training_will_take(tmp_path: Path) -> None:
    job = dataclasses.replace(
        small_job("slow", epochs=1, batches=None), load_eval_dataloader="small_jobs:noise"
    )
    estimate = run(tmp_path, job, how=Measure(1, 3))
    assert estimate.evaluation_seconds >= 500 * 0.02 * 0.9, "of 500 batches, from eight of them"
    assert estimate.seconds(500) >= estimate.evaluation_seconds + 500 * estimate.seconds_per_batch


def test_the_fastest_that_fits_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SATURN_TEST_CANDIDATES", "memory,slow,bug,refuse,quick")
    lines: list[str] = []
    estimate = run(tmp_path, small_job(), "picky", how=Measure(1, 3), log=lines.append)
    assert estimate.parameters == {"how": "quick"}
    assert estimate.seconds_per_batch < 0.05
    measured = [line for line in lines if "s per batch" in line]
    assert [line.split(":")[1].strip(" '}") for line in measured] == ["slow", "quick"]


@pytest.mark.parametrize(
    ("candidates", "words"),
    [
        ("refuse,memory,bug", "out of memory (RuntimeError"),
        ("refuse", "this model is not to my taste"),
        ("bug", "technique 'picky' failed: AttributeError: the technique's own mistake"),
    ],
)
def test_when_none_works_the_reason_is_the_estimate(
    candidates: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SATURN_TEST_CANDIDATES", candidates)
    estimate = run(tmp_path, small_job(), "picky")
    assert estimate.reason is not None
    assert estimate.reason.startswith(words)


def test_a_candidate_that_hangs_does_not_hold_up_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SATURN_TEST_CANDIDATES", "hang,quick")
    assert run(tmp_path, small_job(), "picky", seconds=3, how=Measure(1, 3)).parameters == {"how": "quick"}


def test_a_trial_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SATURN_TEST_CANDIDATES", "hang")
    estimate = run(tmp_path, small_job(), "picky", seconds=2)
    assert estimate.reason is not None
    assert estimate.reason.startswith("its first batch was not done within")


def test_what_never_loads_is_the_jobs_fault_and_that_of_all_that_load_the_same(tmp_path: Path) -> None:
    """Else each technique would be tried, and each trial would wait for it as long."""
    said: list[str] = []
    job = dataclasses.replace(small_job(), load_model="small_jobs:never_loaded")
    with pytest.raises(
        JobError, match="load_model 'small_jobs:never_loaded' did not return within"
    ) as raised:
        run(tmp_path, job, seconds=1, log=said.append)
    assert raised.value.common
    assert "in never_loaded" in said[-1], "where it hung"


def test_steps_that_hang_by_themselves_keep_their_job_from_no_more_than_one_wave(tmp_path: Path) -> None:
    """Each technique's trial begins with them, and would wait for them as long."""
    said: list[str] = []
    job = dataclasses.replace(small_job(), load_model="small_jobs:never_done")
    hung = run(tmp_path, job, seconds=1, log=said.append)
    assert hung.hung_alone
    assert "in forward" in said[-1], "where it hung"

    def untried(*jobs: Job) -> set[str]:
        known = dataclasses.replace(hung, fingerprint=fingerprint(jobs[0]))
        cluster = Cluster(Node("here", devices=2, kind="cpu"), Node("there", devices=2, kind="a100"))
        knowledge = Knowledge.of(jobs, cluster, ["single", "ddp", "fsdp"], [known])
        return {f"{key.technique} on {key.kind}" for key in knowledge.untried()}

    elsewhere = {f"{technique} on a100" for technique in ("single", "ddp", "fsdp")}
    assert untried(job) == elsewhere
    assert untried(dataclasses.replace(job, trust=("ddp",))) == {*elsewhere, "ddp on cpu"}


@pytest.mark.parametrize(("how", "works"), [("load slowly", True), ("slow for ever", False)])
def test_the_clock_of_a_trial_starts_when_the_first_batch_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, works: bool
) -> None:
    monkeypatch.setenv("SATURN_TEST_CANDIDATES", how)
    unguarded = dataclasses.replace(small_job(), trust=("picky",))
    estimate = run(tmp_path, unguarded, "picky", seconds=3)
    assert estimate.works is works
    if works:
        assert estimate.setup_seconds > 4
    else:
        assert estimate.reason is not None
        assert estimate.reason.startswith("not measured within")


def test_a_technique_says_why_not(tmp_path: Path) -> None:
    assert run(tmp_path, small_job(), "single", devices=2).reason == "single uses one device"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("broken_loss", 'raise ValueError("the user\'s own mistake")'),
        ("not_a_number", "loss is nan at step 1"),
        ("absent", "has no 'absent'"),
    ],
)
def test_the_jobs_own_mistakes_are_raised(loss: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        run(tmp_path, small_job(loss), "ddp", devices=2)
    assert words in str(caught.value)


@pytest.mark.parametrize("occupied", [False, True])
def test_memory_that_others_used_says_nothing_of_another_night(occupied: bool) -> None:
    told = [
        {"event": "warning", "message": "others are there", "occupied": occupied},
        {"event": "end", "status": "out_of_memory", "reason": "CUDA out of memory", "traceback": ""},
    ]
    ended: Any = SimpleNamespace(events=lambda: iter(told), kill=lambda: None)
    job = small_job()
    trial = Trial(job=job, technique="single", devices=1, node="here", covers=(job.name,), fingerprint="abc")
    node = Node("n", devices=2, kind="h100")
    found = _followed(ended, trial, node, lambda line: None, lambda job, reason: None, lambda use: None)
    assert found.reason is not None
    assert found.reason.startswith("out of memory")
    assert found.passing is occupied


def test_a_model_that_can_not_be_loaded(tmp_path: Path) -> None:
    job = Job("x", load_model="small_jobs:broken_model", load_dataloader="small_jobs:noise")
    with pytest.raises(JobError, match=r"weights\.pt is not where it was"):
        run(tmp_path, job)


def test_gpus_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SaturnError, match=r"is said to have 64 a100 devices, but . GPUs are visible"):
        run(tmp_path, small_job(), node=Node("local", devices=64, kind="a100"))


def test_a_job_that_is_to_blame_makes_room_for_the_next(tmp_path: Path) -> None:
    def one(name: str, **hparams: Any) -> Job:
        # A trial goes on after the last of four batches, where this schedule ends.
        usual = {"lr_scheduler": "torch.optim.lr_scheduler:OneCycleLR", "batches": 4}
        arguments = {"lr_scheduler_args": {"max_lr": 0.1, "total_steps": 4}}
        return dataclasses.replace(small_job(**{**usual, **arguments, **hparams}), name=name)

    jobs = [
        one("far", lr=1e30, lr_scheduler_args={"max_lr": 1e30, "total_steps": 4}),
        one("capturable", optimizer_args={"capturable": True, "foreach": True}),
        one("good"),
        one("misspelt", optimizer_args={"weight_decai": 0.1}),
        one("steps", lr_scheduler="torch.optim.lr_scheduler:StepLR", lr_scheduler_args={"step": 5}),
        one("also good", lr=0.001, optimizer_args={"weight_decay": 0.1}),
    ]
    tried = []

    def with_job(job: Job, alike: Sequence[Job], on_broken: Callable[[str, str], object]) -> Estimate:
        tried.append(job.name)
        return run(tmp_path / job.name, job, how=Measure(2, 5), alike=alike, on_broken=on_broken)

    estimate, broken = measured_with_any(jobs, with_job)
    assert estimate is not None
    assert estimate.works
    assert tried == ["far", "capturable", "good"]
    assert broken.keys() == {"far", "capturable", "misspelt", "steps"}
    assert "loss is" in broken["far"]
    assert "at step 2" in broken["far"]
    assert "capturable" in broken["capturable"]
    assert "unexpected keyword argument 'weight_decai'" in broken["misspelt"]
    assert "unexpected keyword argument 'step'" in broken["steps"]


@pytest.mark.parametrize(
    ("changes", "common"),
    [
        ({"load_model": "small_jobs:broken_model"}, True),
        ({"loss_function": "small_jobs:not_a_number"}, True),
        ({"load_eval_dataloader": "small_jobs:torn_noise"}, True),
        ({"hparams": HParams(lr=1e30)}, False),
    ],
)
def test_what_fails_before_the_optimizer_steps_is_common(
    changes: dict[str, Any], common: bool, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as caught:
        run(tmp_path, dataclasses.replace(small_job(), **changes), how=Measure(1, 3))
    assert caught.value.common is common


def test_what_only_one_job_meets_is_not_the_techniques_fault(tmp_path: Path) -> None:
    good = dataclasses.replace(small_job(), load_model="small_jobs:strict", name="good")
    far = dataclasses.replace(good, name="far", hparams=dataclasses.replace(good.hparams, lr=1e20))

    def with_job(job: Job, *others: Any) -> Estimate:
        return run(tmp_path / job.name, job, "ddp", devices=2, how=Measure(1, 3))

    estimate, broken = measured_with_any([far, good], with_job)
    assert estimate is not None
    assert estimate.works
    assert broken == {}, "on several devices a rank's error may come from the others"
