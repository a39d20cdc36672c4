from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.tracking.parameters import flat, job_params, job_tags, tags

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=300), values, max_size=5))
@example({"..0": 1, "...": 2, "a" * 249 + "/b": 3})
def test_any_mapping_becomes_what_mlflow_takes(params: dict[str, Any]) -> None:
    from mlflow.entities import Param, RunTag
    from mlflow.utils.validation import _validate_batch_log_data

    _validate_batch_log_data(  # type: ignore[no-untyped-call]
        [],
        [Param(key, value) for key, value in flat(params).items()],
        [RunTag(key, value) for key, value in tags(params).items()],
    )


def test_a_jobs_parameters_are_flat_and_read_as_numbers() -> None:
    job = Job(
        "j",
        "shop.models:gpt2",
        "shop.data:text",
        hparams=HParams(lr=1e-5, batch_size=16, optimizer_args={"weight_decay": 0.1, "betas": [0.9, 0.95]}),
        model_args={"layers": 2, "config": {"tied": True}},
    )
    params = job_params(job, technique="ddp", devices=2, node="local")
    assert float(params["lr"]) == 1e-5
    assert params["batch_size"] == "16"
    assert params["epochs"] == "1"
    assert "batches" not in params
    assert params["optimizer"] == "AdamW"
    assert params["optimizer.weight_decay"] == "0.1"
    assert params["optimizer.betas"] == "[0.9, 0.95]"
    assert params["model.layers"] == "2"
    assert params["model.config.tied"] == "true"
    assert (params["technique"], params["devices"], params["node"]) == ("ddp", "2", "local")


def test_a_jobs_own_metrics_are_named_in_its_run() -> None:
    metrics = {"f1": "shop.metrics:f1"}
    job = Job("a", "m:model", "m:rows", load_eval_dataloader="m:held_out", metrics=metrics)
    assert job_tags(job) == {"saturn.metrics": '["f1"]'}
    assert job_params(job)["metric.f1"] == "shop.metrics:f1"
    assert job_tags(Job("a", "m:model", "m:rows")) == {}
