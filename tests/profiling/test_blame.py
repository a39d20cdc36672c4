"""A job that can't be trained fails, and no other does: the decisions, with a measurer that is not real."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import TECHNIQUES, cluster, job, measure

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.estimates import Estimate, Key, Trial
from saturn_airflow.model.jobs import Job
from saturn_airflow.operators.first_plan import to_plan
from saturn_airflow.operators.profile_task import broken_of
from saturn_airflow.operators.wave_tasks import Learned
from saturn_airflow.profiling import waves
from saturn_airflow.profiling.blame import DoubtfulError, measured_with_any
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.trials import trials_of

# What can be wrong with a job, as its own arguments say it; a night's data are common to all jobs of it.
FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "lr": {"lr": 1e30},
    "keyword": {"optimizer_args": {"weight_decai": 0.1}},
    "scheduler": {"lr_scheduler_args": {"step": 5}},
}
NIGHTS = ("fine", "also fine", "torn")


def faulty(number: int, size: float, fault: str, seed: int, night: str) -> Job:
    made = job(number, size, 100)
    hparams = dataclasses.replace(made.hparams, seed=seed, lr_scheduler="s:Step", **FAULTS[fault])
    return dataclasses.replace(made, data_args={"night": night}, neutral=["night"], hparams=hparams)


def why_it_fails(job: Job) -> str | None:
    """What training this job would raise."""
    if job.data_args["night"] == "torn":
        return f"the data of seed {job.hparams.seed} are torn"
    if fault := next((name for name, args in FAULTS.items() if args and _has(job, args)), None):
        return f"{fault} of {job.name}"
    return None


def _has(job: Job, arguments: dict[str, Any]) -> bool:
    return all(getattr(job.hparams, name) == value for name, value in arguments.items())


class Trials:
    """Stands for the ranks: fails as the job does, and sees in passing what can be seen without training."""

    def __init__(self, key: Key, knowledge: Knowledge) -> None:
        self.key = key
        self.knowledge = knowledge
        self.tried: list[str] = []

    def __call__(self, job: Job, alike: Sequence[Job], on_broken: Callable[[str, str], object]) -> Estimate:
        self.tried.append(job.name)
        if (reason := why_it_fails(job)) is not None:
            error = JobError(reason)
            error.common = "torn" in reason
            raise error
        for other in alike:
            fault = why_it_fails(other) or ""
            if fault.startswith(("keyword", "scheduler")):
                on_broken(other.name, fault)
        return measure(self.key, self.knowledge)


grids = st.lists(
    st.tuples(
        st.sampled_from([0.3, 0.9]),
        st.sampled_from(list(FAULTS)),
        st.integers(0, 2),
        st.sampled_from(NIGHTS),
    ),
    min_size=1,
    max_size=8,
)


def key_of(trial: Trial) -> Key:
    return Key(trial.fingerprint, trial.technique, trial.devices, "cpu")


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(grids)
def test_exactly_the_bad_jobs_fail(grid: list[tuple[float, str, int, str]]) -> None:
    jobs = [faulty(number, *row) for number, row in enumerate(grid)]
    by_name = {job.name: job for job in jobs}
    bad = {job.name: why for job in jobs if (why := why_it_fails(job)) is not None}
    knowledge = Knowledge.of(jobs, cluster(2), list(TECHNIQUES))
    known: list[Estimate] = []
    broken: dict[str, str] = {}
    for trial in trials_of(waves.first_wave(knowledge), knowledge.strategies):
        trials = Trials(key_of(trial), knowledge)
        estimate, found = measured_with_any([by_name[name] for name in trial.covers], trials)
        assert len(trials.tried) == len(set(trials.tried)), "no job is tried twice"
        known += [estimate] if estimate is not None else []
        broken.update(found)
    assert broken.items() <= bad.items(), "each is told what is wrong with itself"

    learned = Knowledge.of(jobs, cluster(2), list(TECHNIQUES), known, broken)
    planned, unplanned = to_plan(Learned(learned, known, broken, 1, 0.0), learned.known, [], "auto", {})
    in_training = {job.name: bad[job.name] for job in planned if job.name in bad}
    failed = {**in_training, **{entry["job"]: entry["reason"] for entry in unplanned}}
    assert failed == bad, "what is fit is planned and finishes; what is not fails with its own reason"
    assert not broken.keys() & in_training.keys(), "and is not trained where that is known"
    for trial in trials_of(learned.untried(), learned.strategies, broken):
        assert not {trial.job.name, *trial.covers} & broken.keys()


def test_what_all_jobs_share_is_tried_once() -> None:
    jobs = [faulty(number, 0.3, "none", 0, "torn") for number in range(5)]
    knowledge = Knowledge.of(jobs, cluster(2), list(TECHNIQUES))
    trials = Trials(waves.first_wave(knowledge)[0], knowledge)
    estimate, broken = measured_with_any(jobs, trials)
    assert estimate is None
    assert trials.tried == ["j0"]
    assert broken == dict.fromkeys([job.name for job in jobs], "the data of seed 0 are torn")


def test_a_strategy_that_only_broken_jobs_may_use_is_not_measured() -> None:
    alone = dataclasses.replace(faulty(0, 0.3, "lr", 0, "fine"), techniques=["wide"])
    other = dataclasses.replace(faulty(1, 0.3, "none", 0, "fine"), techniques=["even"])
    learned = Knowledge.of([alone, other], cluster(2), list(TECHNIQUES), broken=[alone.name])
    assert {key.technique for key in learned.untried()} == {"even"}


@pytest.mark.parametrize(
    ("entry", "broken"),
    [
        ({"attempt": 1.0, "jobs": ["a", "b"], "error": "raised"}, {"a": "raised", "b": "raised"}),
        ({"attempt": 1.0, "estimate": {}}, {}),
        ({"attempt": 1.0, "estimate": {}, "broken": {"a": "raised"}}, {"a": "raised"}),
    ],
)
def test_entries_of_this_version_and_the_one_before_are_read(
    entry: dict[str, Any], broken: dict[str, str]
) -> None:
    assert broken_of(entry) == broken


@pytest.mark.parametrize(("failing", "works"), [(["j0"], True), (["j0", "j1"], False), (["j1"], True)])
def test_what_two_jobs_meet_is_the_techniques_fault(failing: list[str], works: bool) -> None:
    jobs = [faulty(number, 0.3, "none", 0, "fine") for number in range(3)]
    knowledge = Knowledge.of(jobs, cluster(2), list(TECHNIQUES))
    key = waves.first_wave(knowledge)[0]

    def with_job(job: Job, *others: Any) -> Estimate:
        if job.name in failing:
            raise DoubtfulError(Estimate(**key._asdict(), reason="technique 'even' failed", passing=True))
        return measure(key, knowledge)

    estimate, broken = measured_with_any(jobs, with_job)
    assert estimate is not None
    assert (estimate.works, broken) == (works, {})
