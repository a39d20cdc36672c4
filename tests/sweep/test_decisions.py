"""What the tasks of a sweep decide, apart from Airflow: options, outcomes, the best job, addresses."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow import Cluster, HParams, Job, Node
from saturn_airflow.deciding.choices import why_nowhere
from saturn_airflow.deciding.entering import before
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.operators import context
from saturn_airflow.operators.actual_speeds import actual_speeds
from saturn_airflow.operators.choosing import best_of, why_no_best
from saturn_airflow.operators.lost_jobs import why_lost
from saturn_airflow.operators.report_task import (
    ahead,
    estimate_errors,
    of_every_job,
    of_no_plan,
    summarize,
)
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.options import by_key, options_of, total_batches
from saturn_airflow.profiling.trials import device_counts

CLUSTER = Cluster(Node("small", 1, kind="cpu"), Node("large", 2, kind="cpu"), Node("gpu", 4, kind="a100"))


def job(name: str = "a", epochs: int = 2, **fields: Any) -> Any:
    fields = {"hparams": HParams(epochs=epochs), **fields}
    return Job(name, "shop.models:gpt2", "shop.data:python_text", **fields)


def estimate(
    of: Any,
    technique: str = "single",
    devices: int = 1,
    kind: str = "cpu",
    per_epoch: int = 10,
    **fields: Any,
) -> Any:
    usual = {"seconds_per_batch": 0.5, "setup_seconds": 2.0, "batches_per_epoch": per_epoch}
    return Estimate(
        fingerprint=fingerprint(of), technique=technique, devices=devices, kind=kind, **{**usual, **fields}
    )


def test_options_are_what_works_and_fits() -> None:
    known = by_key(
        estimate(job()),
        estimate(job(), "ddp", 2),
        estimate(job(), "ddp", 4, "a100"),
        estimate(job(), "fsdp", 2, reason="out of memory"),
        estimate(job(model_args={"n": 3}), "tensor", 2),
    )
    assert {(o.technique, o.devices) for o in options_of(job(), known, CLUSTER)} == {
        ("single", 1),
        ("ddp", 2),
        ("ddp", 4),
    }
    bound = job(nodes=["small"])
    assert [(o.technique, o.seconds) for o in options_of(bound, known, CLUSTER)] == [
        ("single", {"cpu": 12.0})
    ]
    narrow = job(techniques=["ddp"], nodes=["small"])
    assert options_of(narrow, known, CLUSTER) == ()
    assert "fsdp x 2: out of memory" in why_nowhere(narrow, list(known.values()), [])


def test_a_technique_that_does_not_count_batches_gets_the_count_of_those_that_do() -> None:
    known = by_key(estimate(job()), estimate(job(), "mine", 2, per_epoch=0))
    assert total_batches(job(), known) == 20
    assert {o.technique: o.seconds["cpu"] for o in options_of(job(), known, CLUSTER)} == {
        "single": 12.0,
        "mine": 12.0,
    }


def test_data_without_a_length_needs_a_number_of_batches() -> None:
    endless = [estimate(job(), per_epoch=0)]
    assert options_of(job(), by_key(*endless), CLUSTER) == ()
    assert "HParams(batches=...)" in why_nowhere(job(), endless, [])
    counted = job(hparams=HParams(batches=4))
    assert options_of(counted, by_key(estimate(counted, per_epoch=0)), CLUSTER)[0].seconds == {"cpu": 4.0}


@given(st.integers(1, 64))
def test_device_counts_hold_one_and_all(devices: Any) -> None:
    counts = device_counts(Node("a", devices))
    assert counts[0] == 1
    assert counts[-1] == devices
    assert len(counts) <= devices.bit_length() + 1


def outcome(name: str = "a", status: str = "finished", **fields: Any) -> Any:
    usual = {
        "job": name,
        "status": status,
        "technique": "ddp",
        "devices": 1,
        "planned_seconds": 10.0,
        "started_at": 100.0,
        "ended_at": 112.0,
        "actual_seconds": 12.0,
        "seconds_per_batch": 0.5,
        "batches": 20,
        "steps": 20,
    }
    return Outcome.from_dict({**usual, **fields})


def unknown(lost: Sequence[str]) -> Mapping[str, str]:
    return dict.fromkeys(lost, "unknown")


def test_every_job_of_the_sweep_is_in_the_result() -> None:
    plan = Plan("p", "makespan", 20.0, 16.0, 0.1)
    every = of_every_job(
        ["a", "b", "c", "d"],
        [{"job": "b", "reason": "fits nowhere"}],
        [outcome("a"), outcome("c", "failed", reason="raised", started_at=104.0, ended_at=116.0, devices=2)],
        unknown,
    )
    assert [(o.job, o.status) for o in every] == [
        ("a", "finished"),
        ("b", "not_planned"),
        ("c", "failed"),
        ("d", "lost"),
    ]
    result = summarize(every, plan, devices=4, made=98.0)
    assert result["missing"] == ["b", "c", "d"]
    assert result["actual_seconds"] == 18.0
    assert result["utilisation"] == pytest.approx((12 + 2 * 12) / (18 * 4))
    assert result["gap"] == pytest.approx(0.25)
    assert result["estimate_error_median"] == pytest.approx(0.2)


def test_a_node_whose_jobs_end_after_their_report_has_another_clock() -> None:
    outcomes = [outcome("a", ended_at=100.0, node="x"), outcome("b", ended_at=190.0, node="y")]
    outcomes += [outcome("c", ended_at=170.0, node="y"), Outcome.from_dict({"job": "d", "status": "lost"})]
    assert ahead(outcomes, 150.0) == {"y": 40.0}
    assert ahead(outcomes, 189.0) == {}


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (
            {"sweep.train.gpu-a_1": "removed"},
            "the DAG was changed as the sweep ran, and Airflow removed its train tasks (sweep.train.gpu-a):",
        ),
        (
            {"sweep.round_2.train.b": "removed"},
            "the DAG was changed as the sweep ran, and Airflow removed its train tasks "
            "(sweep.round_2.train.b):",
        ),
        ({"sweep.train_2": "removed"}, "its train task left no outcome; see its log"),  # a shorter list
        ({"other.train.gpu-a_1": "removed"}, "its train task left no outcome; see its log"),
        ({"sweep.train_1": "success"}, "its train task is a success, but has told of no training"),
        ({"sweep.train_1": "failed"}, "its train task has failed before it could tell of any training"),
        ({"sweep.train_1": "skipped"}, "its train task was skipped"),
        ({"sweep.round_2.train.x_0": "success", "sweep.train_1": "failed"}, "its train task is a success"),
        ({"sweep.round_2.train.x": "upstream_failed"}, "its train task did not run"),
    ],
)
def test_a_job_of_whose_task_nothing_was_heard_says_why(others: dict[str, str], says: str) -> None:
    states = {"sweep.plan": "success", "sweep.train_0": "success", **others}
    fields: Any = {"technique": "single", "devices": 1, "device_ids": (0,), "start": 0.0, "end": 1.0}
    fields |= {"kind": "cpu", "fingerprint": "f", "attempt": 1.0, "position": 0}
    y, x = (PlanEntry(job=job(name), node=n, **fields).to_dict() for name, n in (("a", "y"), ("b", "x")))
    told = {"sweep.plan": [y, x], "sweep.round_2.plan": [y, x], "sweep.round_3.plan": None}
    ti = SimpleNamespace(
        dag_id="d",
        run_id="r",
        get_task_states=lambda **_: {"r": states},
        xcom_pull=lambda task_ids, **_: told[task_ids],
    )
    dag = SimpleNamespace(has_task=lambda name: name in ("sweep.train", "sweep.plan"))
    report = SimpleNamespace(
        dag=dag,
        settings=SimpleNamespace(group="sweep"),
        plan_tasks=list(told),
        train_tasks=["sweep.train", "sweep.round_2.train.y", "sweep.round_2.train.x"],
    )
    finished, lost = of_every_job(["a", "b"], [], [outcome("a")], lambda lost: why_lost(ti, report, lost))
    assert (finished.status, lost.status) == ("finished", "lost")
    assert (lost.reason or "").startswith(says)


def test_a_sweep_that_trained_nothing_has_a_result_too() -> None:
    every = of_every_job(["a"], [], [], unknown)
    result = summarize(every, None, devices=4, made=None)
    assert result["failed"] == ["a"]
    assert result["actual_seconds"] == 0
    assert best_of(every, None, "min") is None


def test_a_plan_that_failed_is_not_told_of_as_lost_training() -> None:
    said = [{"job": "b", "reason": "fits nowhere"}]
    found = of_every_job(["a", "b"], of_no_plan(["a", "b"], said, "sweep.plan"), [], unknown)
    assert [o.status for o in found] == ["not_planned", "not_planned"]
    assert found[0].reason == "nothing was planned, since sweep.plan did not succeed; its log says why"
    assert found[1].reason == "fits nowhere"


def test_what_was_resumed_says_nothing_of_the_estimate() -> None:
    resumed = outcome("b", batches=1, actual_seconds=500.0)
    assert estimate_errors([outcome(), resumed]) == {
        "estimate_error_median": pytest.approx(0.2),
        "estimate_error_p90": pytest.approx(0.2),
    }
    assert actual_speeds([resumed]) == []


def found_best(*arguments: Any) -> dict[str, Any]:
    found = best_of(*arguments)
    assert found is not None
    return found


def test_the_best_job() -> None:
    jobs = [
        outcome("a", loss=1.0, epoch_loss=2.0, eval_loss=4.0),
        outcome("b", loss=2.0, epoch_loss=1.0, eval_loss=3.0),
        outcome("c", loss=0.1, epoch_loss=math.nan, eval_loss=None),
        outcome("d", "failed", loss=0.0, epoch_loss=0.0, eval_loss=0.0),
    ]
    assert found_best(jobs[:2], None, "min")["metric"] == "eval_loss"
    assert found_best(jobs[:2], None, "min")["job"] == "b"
    assert found_best(jobs, None, "min")["metric"] == "epoch_loss"
    assert found_best(jobs, None, "min")["job"] == "b"
    assert found_best(jobs, "loss", "min")["job"] == "c"
    assert found_best(jobs, "loss", "max")["job"] == "b"


def test_the_best_job_by_a_metric_of_its_own() -> None:
    jobs = [
        outcome("a", eval_loss=0.1, metrics={"accuracy": 0.5, "scores/f1": 0.9}),
        outcome("b", eval_loss=0.2, metrics={"accuracy": 0.7, "scores/f1": None}),
        outcome("c", eval_loss=0.3, metrics={"accuracy": math.nan}),
        outcome("d", eval_loss=0.4),
    ]
    best = best_of(jobs, "accuracy", "max")
    assert best is not None
    assert (best["job"], best["metric"], best["value"]) == ("b", "accuracy", 0.7)
    assert found_best(jobs, "scores/f1", "max")["job"] == "a"
    assert best_of(jobs, "recall", "max") is None
    assert why_no_best(jobs, "accuracy") is why_no_best(jobs, None) is why_no_best([], "recall") is None
    assert "no job has a number as its 'scores/f2'" in str(why_no_best(jobs, "scores/f2"))
    assert str(why_no_best(jobs, "scores/f2")).endswith("they have accuracy, scores/f1")
    assert found_best(jobs, None, "min")["metric"] == "eval_loss"


@pytest.mark.slow
@given(
    st.recursive(
        st.floats() | st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_what_is_pushed_is_json(value: Any) -> None:
    json.dumps(context.finite(value), allow_nan=False)


def test_a_number_that_airflow_hands_to_no_task_is_left_out() -> None:
    """Postgres makes whole numbers of them: one diverging job's loss ended the report of all."""
    pushed = context.finite({"loss": [1e25, -(2.0**63), 1e18, 2.5], "nan": float("nan"), "steps": 5})
    assert pushed == {"loss": [None, None, 1e18, 2.5], "nan": None, "steps": 5}


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        (("mlflow", "mlflow", None, 5000), "http://mlflow:5000"),
        (("https", "mlflow.corp", "", 443), "https://mlflow.corp:443"),
        (("http", "mlflow.corp", "https", None), "https://mlflow.corp"),
        (("mlflow", "https://mlflow.corp/team/a", None, 8443), "https://mlflow.corp:8443/team/a"),
        (("mlflow", "http://mlflow:5000", "", 5000), "http://mlflow:5000"),
    ],
)
def test_the_address_of_mlflow(fields: Any, address: Any) -> None:
    assert context.tracking_address(*fields) == address


def test_the_users_folders_travel_and_the_interpreters_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below_the_prefix = f"{sys.prefix}/airflow/dags"
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), below_the_prefix])
    travels = context.user_path()
    assert str(tmp_path) in travels
    assert below_the_prefix in travels
    assert not any(entry.endswith(("site-packages", "lib-dynload")) for entry in travels)


def test_secrets_stay_out_of_mlflow() -> None:
    shown = context.hide_secrets({"data.password": "hunter2", "data.day": "2026-11-21", "lr": "0.1"})
    assert shown == {"data.password": "***", "data.day": "2026-11-21", "lr": "0.1"}


def test_each_job_knows_who_has_its_devices_before_it() -> None:
    def on(job: Any, devices: Any, start: Any, end: Any, node: str = "large") -> Any:
        return Assignment(job, "ddp", len(devices), node, tuple(devices), start, end)

    plan = [
        on("a", [0], 0, 5),
        on("elsewhere", [0], 0, 5, node="small"),
        on("b", [1], 0, 3),
        on("c", [1], 3, 5),
        on("d", [0, 1], 5, 9),
    ]
    assert [before(assignment, plan[:place]) for place, assignment in enumerate(plan)] == [
        (),
        (),
        (),
        ("b",),
        ("a", "c"),
    ]
