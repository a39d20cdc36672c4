"""What is remembered of the guard, of which jobs it holds, and what a planner makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from saturn_airflow.model import guards
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.profiling.blame import measured_with_any
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import by_key, options_of, refusal
from saturn_airflow.profiling.waves import first_wave

CLUSTER = Cluster(Node("here", devices=2, kind="cpu"))


def job(name: str = "a", techniques: Any = ("ddp", "fsdp"), **changes: Any) -> Job:
    hparams = {"batches": 10, "optimizer_args": {"weight_decay": 0.0}, **changes.pop("hparams", {})}
    return Job(name, "m:model", "m:data", hparams=HParams(**hparams), techniques=techniques, **changes)


def estimate(of: Job, technique: str = "ddp", verdict: str | None = None, **changes: Any) -> Estimate:
    verdicts = {} if verdict is None else {guards.mark(of, "1"): verdict}
    fields = {"seconds_per_batch": 1.0, "batches": 5, "verdicts": verdicts, **changes}
    return Estimate(fingerprint=fingerprint(of), technique=technique, devices=2, kind="cpu", **fields)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"hparams": {"lr": 0.5, "seed": 3, "batches": 99}}, True),
        ({"hparams": {"optimizer_args": {"weight_decay": 0.1}}}, False),
        ({"hparams": {"optimizer": "torch.optim:SGD"}}, False),
        ({"hparams": {"clip_grad_norm": 1.0}}, False),
        ({"hparams": {"accumulate": 2}}, False),
        ({"model_args": {"layers": 2}}, False),
        ({"data_args": {"day": "monday"}}, False),
        ({"load_eval_dataloader": "m:other"}, False),
        ({"data_args": {"day": "monday"}, "neutral": ["day"]}, True),
        ({"name": "b", "techniques": None, "trust": ["ddp"], "exact": True}, True),
    ],
)
def test_what_a_verdict_holds_for(changes: dict[str, Any], same: bool) -> None:
    assert (guards.mark(job(**changes), "1") == guards.mark(job(), "1")) == same
    assert guards.mark(job(), "1") != guards.mark(job(), "2"), "another version of the technique"


def test_decay_counts_by_whether_there_is_any() -> None:
    some, more = (job(hparams={"optimizer_args": {"weight_decay": decay}}) for decay in (0.1, 0.2))
    assert guards.mark(some, "1") == guards.mark(more, "1") != guards.mark(job(), "1")


@pytest.mark.parametrize(
    ("verdict", "changes", "allowed"),
    [
        (None, {}, True),
        ("exact", {"exact": True}, True),
        ("distribution", {}, True),
        ("distribution", {"exact": True}, False),
        ("not checked: too large", {}, True),
        ("not checked: too large", {"exact": True}, False),
        ("refused: ddp x 2 changes the result", {}, False),
        ("refused: ddp x 2 changes the result", {"trust": ["ddp"]}, True),
    ],
)
def test_what_a_plan_may_use(verdict: str | None, changes: dict[str, Any], allowed: bool) -> None:
    a_job = job(**changes)
    known = estimate(a_job, verdict=verdict)
    assert bool(options_of(a_job, by_key(known), CLUSTER)) == allowed
    assert (refusal(a_job, known) is None) == allowed


def test_what_is_refused_for_one_job_may_train_another_of_its_fingerprint() -> None:
    decaying = job("b", hparams={"optimizer_args": {"weight_decay": 0.1}})
    assert fingerprint(decaying) == fingerprint(job())
    known = by_key(estimate(decaying, verdict="refused: it decays what is unused"))
    assert options_of(job(), known, CLUSTER)
    assert not options_of(decaying, known, CLUSTER)
    assert refusal(decaying, estimate(decaying, verdict="refused: it decays")) == "it decays"


def test_a_trial_goes_on_with_the_next_job_where_the_guard_refuses_the_first() -> None:
    decaying = job("b", hparams={"optimizer_args": {"weight_decay": 0.1}})
    again = dataclasses.replace(decaying, name="c")
    tried = []

    def measure(a_job: Job, others: Any, on_broken: Any) -> Estimate:
        tried.append(a_job.name)
        if a_job.name == "a":
            return estimate(a_job, verdict="exact")
        return estimate(a_job, verdict="refused: no", reason="no")

    found, broken = measured_with_any([decaying, again, job()], measure)
    assert tried == ["b", "a"], "what is refused for b is refused for c"
    assert found is not None
    assert found.works
    assert set(found.verdicts.values()) == {"refused: no", "exact"}
    assert broken == {}
    found, _ = measured_with_any([decaying, again], measure)
    assert found is not None
    assert found.reason == "no"


def test_what_was_refused_is_tried_again_for_a_job_of_another_definition() -> None:
    decaying = job("b", hparams={"optimizer_args": {"weight_decay": 0.1}})
    refused = estimate(decaying, verdict="refused: no", reason="no")
    assert refused.key in Knowledge.of([decaying], CLUSTER, None, [refused]).known
    assert refused.key not in Knowledge.of([decaying, job()], CLUSTER, None, [refused]).known


def test_another_technique_is_looked_for_where_all_that_works_is_refused() -> None:
    a_job = job()
    works = estimate(a_job, verdict="exact")
    assert first_wave(Knowledge.of([a_job], CLUSTER, None, [works])) == []
    refused = estimate(a_job, verdict="refused: no")
    assert {key.technique for key in first_wave(Knowledge.of([a_job], CLUSTER, None, [refused]))} == {"fsdp"}


@pytest.mark.parametrize("wrong", [{"trust": "ddp"}, {"exact": 1}, {"trust": [1]}])
def test_mistakes_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSweepError, match=next(iter(wrong))):
        job(**wrong)


def test_jobs_keep_them() -> None:
    a_job = job(trust=["ddp"], exact=True)
    assert Job.from_dict(a_job.to_dict()) == a_job
    assert "trust" not in job().to_dict()
