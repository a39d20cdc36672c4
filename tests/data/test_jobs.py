"""Jobs, hyper-parameters and grids: what is refused, with which message, and what survives a round trip."""

# Users make mistakes in types, too.
# mypy: disable-error-code="arg-type, call-arg, misc"

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow import Cluster, DoesNotFit, HParams, InvalidSweepError, Job, Node, Rounds, grid
from saturn_airflow.launch import request
from saturn_airflow.model.jobs import check_jobs


def job(name: str = "gpt2", **fields: Any) -> Job:
    return Job(name, load_model="shop.models:gpt2", load_dataloader="shop.data:python_text", **fields)


def measured(metrics: object) -> Job:
    return job(load_eval_dataloader="shop.data:python_text_eval", metrics=metrics)


def module_level() -> None:
    """A function a job may refer to."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: job(name=""), "1 to 200 characters"),
        (lambda: job(name="a\nb"), "no control characters"),
        (lambda: job(hparams={"lr": 1}), "hparams is of type dict; write HParams"),
        (lambda: job(model_args={"f": print}), "must fit in JSON"),
        (lambda: job(data_args={"mark": "a\ud800"}), "must fit in JSON"),
        (
            lambda: job(data_args={"mark": {"a\0": 1}}),
            "has the text 'a\\x00' with a NUL, which databases refuse",
        ),
        (lambda: job(data_args={"mark": [{"a": 2**70}]}), "has the whole number 1180591620717411303424, and"),
        (lambda: job(model_args=[1]), "give a mapping"),
        (lambda: job(techniques="ddp"), "give a list of names"),
        (lambda: job(nodes=[]), "give a list of names"),
        (lambda: job(loss_function=lambda a, b: 0), "a lambda can't be found again"),
        (lambda: job(loss_function="shop.models.lm_loss"), "is not a reference; write 'module:name'"),
        (lambda: job(loss_function=3), "a int is not a reference"),
        (lambda: measured("accuracy"), "metrics is 'accuracy'; give a mapping from names to functions"),
        (lambda: measured({"accuracy": lambda outputs, targets: 0}), "metrics['accuracy']: a lambda"),
        (lambda: measured({"loss": "m:f"}), "names a metric 'loss', which Saturn measures itself"),
        (lambda: measured({"top/1": "m:f"}), "names a metric 'top/1'; a name begins with a letter"),
        (lambda: job(metrics={"f1": "m:f"}), "measured on the data of load_eval_dataloader, which the job"),
        (lambda: job(load_modell="m:f"), "job: there is no 'load_modell'; did you mean 'load_model'?"),
        (lambda: HParams(learning_rate=1), "hparams: there is no 'learning_rate'; did you mean 'lr'?"),
        (lambda: HParams(batches=1, max_steps=2), "hparams: batches and max_steps are the same"),
        (lambda: HParams(optimizer="adamw"), "'module:name', such as 'torch.optim:AdamW'"),
        (lambda: HParams(optimizer="torch.optim:LBFGS"), "LBFGS, which computes the loss several times"),
        (
            lambda: HParams(lr_scheduler="torch.optim.lr_scheduler:ReduceLROnPlateau"),
            "ReduceLROnPlateau, which waits for a metric",
        ),
        (lambda: HParams(lr="{{ params.lr }}"), "can't be templates; let an upstream task return the jobs"),
        (lambda: Node("a", gpus=2), "node: there is no 'gpus'; did you mean 'devices'?"),
        (lambda: Node("a"), "node: it needs 'devices'; write Node(devices=...)"),
        (lambda: Node("a", 2, devices=2), "node: devices is given twice, by its place and by its name"),
        (lambda: Node("a", devices=2, kind="CPU"), "kind is 'CPU'; did you mean 'cpu'?"),
        (lambda: Job("a"), "job: it needs 'load_model'; write Job(load_model=...)"),
        (
            lambda: HParams(3, lr=0.1),
            "hparams: 3 stands without a name; name each argument, as in HParams(lr=",
        ),
        (lambda: grid(job("a-{lr}"), lr={1.0, 2.0}), "give a list of values"),
        (lambda: Cluster(nodes=[]), "the cluster has no 'nodes'; write Cluster(Node("),
        (lambda: HParams(lr="fast"), "lr is 'fast'; it must be a number"),
        (lambda: HParams(lr=-1), "lr is -1"),
        (lambda: HParams(lr=float("nan")), "lr is nan"),
        (lambda: HParams(epochs=0), "epochs is 0; it must be a whole number of at least 1"),
        (lambda: HParams(epochs=1.5), "epochs is 1.5"),
        (lambda: HParams(epochs=1, batches=2), "epochs or batches, not both"),
        (lambda: HParams(batch_size=True), "batch_size is True"),
        (lambda: HParams(accumulate=0), "accumulate is 0"),
        (lambda: HParams(seed=-1), "seed is -1"),
        (lambda: HParams(clip_grad_norm=0), "clip_grad_norm is 0; it must be above 0"),
        (lambda: HParams(precision="fp8"), "choose one of float32, tf32, bf16, float64"),
        (lambda: HParams(compile="yes"), "compile is 'yes'"),
        (lambda: HParams(optimizer_args={"f": print}), "must fit in JSON"),
    ],
)
def test_a_mistake_is_named(make: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError, match=None) as caught:
        make()
    assert message in str(caught.value)


def test_a_closure_is_refused_by_name() -> None:
    def closure() -> None: ...

    with pytest.raises(
        InvalidSweepError, match=r"job 'gpt2': loss_function: .*closure.* inside something else"
    ):
        job(loss_function=closure)


def test_a_module_level_function_becomes_its_reference() -> None:
    assert job(loss_function=module_level).loss_function == f"{__name__}:module_level"


def test_one_epoch_unless_told_otherwise() -> None:
    assert HParams().epochs == 1
    assert HParams(batches=5).epochs is None


def test_grid_fills_names_and_puts_values_where_they_belong() -> None:
    jobs = grid(
        job("gpt2-{n_layer}-{lr}", model_args={"n_layer": 2}, data_args={"n_layer": 0}),
        lr=[1e-3, 3e-3],
        n_layer=[2, 4],
    )
    assert [j.name for j in jobs] == ["gpt2-2-0.001", "gpt2-4-0.001", "gpt2-2-0.003", "gpt2-4-0.003"]
    assert jobs[1].model_args == {"n_layer": 4}
    assert jobs[1].data_args == {"n_layer": 4}
    assert jobs[2].hparams.lr == 3e-3


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("a", {"lr": [1, 2]}, "name the job 'a-{lr}'"),
        ("a-{lr}", {"lr": [1, 1]}, "a value stands twice"),
        ("a-{lr}", {"lr": []}, "lr has no values"),
        ("a-{lr}", {"lr": 3}, "lr is 3; give a list"),
        ("a-{lr}", {"lr": "{{ params.lrs }}"}, "call grid in an upstream task"),
        ("a-{lr}", {"depth": [3]}, "'depth' is no hyper-parameter"),
        ("a-{depth}", {"lr": [3]}, "has {depth}, which is neither varied nor given"),
    ],
)
def test_a_grid_that_cannot_be(name: Any, values: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError) as caught:
        grid(job(name), **values)
    assert message in str(caught.value)


def test_parts_of_batches_are_not_taken_for_batches() -> None:
    """Elsewhere a step often takes ``gradient_accumulation_steps`` batches; here one, in so many parts."""
    with pytest.raises(InvalidSweepError, match="for parts of that size give 32"):
        HParams(batch_size=4, gradient_accumulation_steps=8)


def test_other_names_and_numbers_of_numpy_mean_the_same() -> None:
    named = HParams(max_steps=np.int64(3), gradient_accumulation_steps=2, lr=np.float64(0.5))
    assert named == HParams(batches=3, accumulate=2, lr=0.5)
    assert type(named.batches) is int
    assert Rounds(max_rounds=3) == Rounds(most=3)
    assert DoesNotFit is request.DoesNotFit
    assert Job.from_dict({**job().to_dict(), "hparams": {"max_steps": 3}}).hparams.batches == 3
    assert job(model_args={"sizes": [np.int64(2)]}).model_args == {"sizes": [2]}


def test_a_grid_reaches_into_mappings() -> None:
    deep = job(
        "a-{weight_decay}-{optimizer_args.eps:.0e}-{depth}", model_args={"config": {"depth": 1, "width": 8}}
    )
    values = {"optimizer_args.weight_decay": [0.0, 0.1], "optimizer_args.eps": [1e-8]}
    jobs = grid(deep, {**values, "model_args.config.depth": np.array([2, 4])})
    assert [j.name for j in jobs] == ["a-0.0-1e-08-2", "a-0.0-1e-08-4", "a-0.1-1e-08-2", "a-0.1-1e-08-4"]
    assert jobs[3].hparams.optimizer_args == {"weight_decay": 0.1, "eps": 1e-8}
    assert jobs[3].model_args == {"config": {"depth": 4, "width": 8}}
    pairs = grid(
        job("a-{optimizer_args.betas}"), {"optimizer_args.betas": [(0.9, np.float64(0.5)), (0.8, 0.9)]}
    )
    assert [j.name for j in pairs] == ["a-(0.9, 0.5)", "a-(0.8, 0.9)"]
    with pytest.raises(InvalidSweepError, match="leads into 8, which is no mapping"):
        grid(deep, {**values, "model_args.config.depth": [1], "model_args.config.width.x": [1]})
    with pytest.raises(InvalidSweepError, match="give one Job and what varies of it, not a list"):
        grid([deep], lr=[1])


def test_grid_over_batches_drops_the_default_epoch() -> None:
    assert [j.hparams.batches for j in grid(job("a-{batches}"), batches=[3, 4])] == [3, 4]


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([], "the sweep has no jobs"),
        ([job(), job()], "two jobs are named 'gpt2'"),
        (["gpt2"], "jobs holds 'gpt2' of type str"),
    ],
)
def test_a_sweep_that_cannot_be(jobs: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        check_jobs(jobs)


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**31), 2**31)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
jobs_of_any_kind = st.builds(
    Job,
    name=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=200),
    load_model=st.just("shop.models:gpt2"),
    load_dataloader=st.just("shop.data:python_text"),
    model_args=st.dictionaries(texts, json_values, max_size=3),
    techniques=st.none() | st.lists(st.sampled_from(["ddp", "fsdp"]), min_size=1),
    hparams=st.builds(
        HParams,
        epochs=st.none() | st.integers(1, 5),
        lr=st.floats(0, 10),
        batch_size=st.none() | st.integers(1, 512),
        clip_grad_norm=st.none() | st.floats(0.01, 10),
        precision=st.sampled_from(["float32", "tf32", "bf16", "float64"]),
    ),
)


@pytest.mark.slow
@given(jobs_of_any_kind)
def test_a_job_survives_json(original: Any) -> None:
    assert Job.from_dict(json.loads(json.dumps(original.to_dict()))) == original


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("gpt2", "a job is a Job"),
        ({"name": "a", "load_model": "m:f"}, "load_dataloader"),
        ({"name": "a", "load_model": "m:f", "load_dataloader": "m:d", "speed": 3}, "there is no 'speed'"),
        (
            {"name": "a", "load_model": "m:f", "load_dataloader": "m:d", "hparams": {"x": 1}},
            "there is no 'x'",
        ),
        ({"name": "a", "load_model": "m:f", "load_dataloader": "m:d", "hparams": 3}, "give a mapping"),
    ],
)
def test_data_that_is_no_job(data: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError) as caught:
        Job.from_dict(data)
    assert message in str(caught.value)


def test_metrics_are_plain_data() -> None:
    made = measured({"accuracy": module_level, "f1": "shop.metrics:F1"})
    assert made.metrics == {"accuracy": f"{__name__}:module_level", "f1": "shop.metrics:F1"}
    assert Job.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert "metrics" not in measured({}).to_dict(), "jobs without are what they were"
