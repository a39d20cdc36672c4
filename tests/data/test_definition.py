"""A job's definition: it changes with what can change the result, and with nothing else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow.model.definition import Change, Definition
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import HParams, Job

JOB = Job("a", load_model="m:f", load_dataloader="d:f", model_args={"layers": 2}, hparams=HParams(lr=0.1))
# One other value for each field of a job: whoever adds a field must say which it is.
WITH_EFFECT: dict[str, Any] = {
    "load_model": "m:g",
    "load_dataloader": "d:g",
    "loss_function": "l:f",
    "hparams": HParams(lr=0.2),
    "model_args": {"layers": 3},
    "data_args": {"day": "mon"},
    "load_eval_dataloader": "d:e",
    "data_version": "7",
    "batch_dim": 1,
    "couples_batch": True,
    "init_from": "models:/digits/3",
    "own_step": True,
}
WITHOUT_EFFECT: dict[str, Any] = {
    "name": "b",
    "techniques": ["ddp"],
    "nodes": ["n"],
    "neutral": ["layers"],
    "trust": ["ddp"],
    "exact": True,
    "metrics": {"f1": "m:f1"},
    "init_missing": "scratch",
    "on_step": "m:f",
    "on_epoch": "m:f",
    "connections": ["shop_db"],
}


def test_every_field_of_a_job_is_thought_of() -> None:
    # A job with a trainer has few other fields.
    assert {f.name for f in dataclasses.fields(Job)} == {*WITH_EFFECT, *WITHOUT_EFFECT, "trainer"}
    own = Job("a", load_model="m:f", load_dataloader="d:f", own_step=True)
    assert Definition.of(own).hash != Definition.of(Job("a", load_model="m:f", trainer=True)).hash


@pytest.mark.parametrize("field", WITH_EFFECT)
def test_what_can_change_the_result_changes_the_definition(field: str) -> None:
    before = Definition.of(JOB)
    now = Definition.of(dataclasses.replace(JOB, **{field: WITH_EFFECT[field]}))
    assert before.hash != now.hash
    (change,) = before.changes(now)
    assert change.field.split(".")[0] == field
    assert now.changes(before) == [Change(change.field, change.now, change.before)]


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_where_and_how_fast_a_job_trains_and_what_is_measured_does_not(field: str) -> None:
    evaluated = dataclasses.replace(JOB, load_eval_dataloader="d:e")
    other = Definition.of(dataclasses.replace(evaluated, **{field: WITHOUT_EFFECT[field]}))
    assert other == Definition.of(evaluated)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(HParams)])
def test_every_hyper_parameter_counts(field: str) -> None:
    others = {"epochs": 2, "optimizer": "o:f", "lr": 0.3, "parameter_groups": "p:f", "lr_scheduler": "s:f"}
    others |= {"precision": "bf16", "compile": True, "clip_grad_norm": 1.0}
    others |= {"early_stopping": {"patience": 2, "metric": "epoch_loss"}}
    value = others.get(field, {"x": 1} if field.endswith("_args") else 5)
    given: dict[str, Any] = {"lr": 0.1, field: value}
    hparams = HParams(**given)
    assert Definition.of(JOB).changes(Definition.of(dataclasses.replace(JOB, hparams=hparams)))


def test_the_metric_that_ends_a_job_counts_and_no_other() -> None:
    def ending(by: str, **metrics: str) -> Definition:
        stopping = {"metric": by, "mode": "max"}
        hparams = HParams(lr=0.1, early_stopping=stopping)
        return Definition.of(
            dataclasses.replace(JOB, hparams=hparams, metrics=metrics, load_eval_dataloader="d:e")
        )

    before = ending("f1", f1="m:f1", recall="m:recall")
    (change,) = before.changes(ending("f1", f1="m:f1_by_class", recall="m:recall"))
    assert str(change) == 'metrics.f1 was "m:f1" and is "m:f1_by_class"'
    assert before == ending("f1", f1="m:f1")
    assert ending("top/5", top="m:top").changes(ending("top/5", top="m:best"))
    assert ending("epoch_loss", f1="m:f1") == ending("epoch_loss")
    # Earlier versions did not note it.
    noted = {name: value for name, value in before.fields.items() if name != "metrics"}
    assert not Definition(noted).changes(before)
    assert not before.changes(Definition(noted))


def test_what_is_said_and_what_is_the_default_are_the_same() -> None:
    said = HParams(epochs=1, lr=1e-3, seed=0, precision="float32")
    one, other = (dataclasses.replace(JOB, hparams=hparams) for hparams in (said, HParams()))
    assert Definition.of(one) == Definition.of(other)
    whole, decimal = (dataclasses.replace(JOB, hparams=HParams(lr=lr)) for lr in (1, 1.0))
    assert Definition.of(whole).hash == Definition.of(decimal).hash


def test_hashes_stay_what_they_are() -> None:
    # Upgrading must not restart anybody's training: where this fails, what is hashed has changed.
    assert Definition.of(JOB).hash == "32f08897c931d69c"
    assert Definition.of(JOB, "c0ffee").hash == "d49061f59f34dbd2"


# A job's arguments have no NUL.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | TEXT
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
        max_leaves=4,
    ),
    st.integers(-(2**63), 2**63 - 1),
)
def test_equal_hashes_and_no_changes_are_one_thing(value: Any, other: int) -> None:
    one, two = (Definition.of(dataclasses.replace(JOB, data_args={"x": v})) for v in (value, other))
    assert bool(one.changes(two)) == (one.hash != two.hash)
    back = Definition.from_dict(json.loads(json.dumps(one.to_dict())))
    assert back.changes(one) == []
    assert back.hash == one.hash


def test_long_values_are_shortened_and_a_data_version_is_text() -> None:
    long = Definition.of(dataclasses.replace(JOB, data_args={"x": "y" * 500}))
    (change,) = Definition.of(JOB).changes(long)
    assert len(str(change)) < 150
    with pytest.raises(InvalidSweepError, match="data_version is 7; give a text"):
        dataclasses.replace(JOB, data_version=7)  # type: ignore[arg-type]
