"""Secrets among a job's arguments, and values that look like them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from saturn_airflow import InvalidSweepError, Job, Secret, grid
from saturn_airflow.model import clear_secrets, secrets
from saturn_airflow.model.definition import Definition

PASSWORD = Secret("shop_db", "password")


def job(**given: Any) -> Any:
    return Job("a", load_model="shop.models:gpt2", load_dataloader="shop.data:rows", **given)


def test_a_secret_is_plain_data_wherever_it_stands() -> None:
    data = {"db": {"hosts": ["h", PASSWORD], "user": "ann"}}
    one = job(data_args=data, model_args={"token": Secret("hub", "token")}, connections=["shop_db"])
    again = Job.from_dict(json.loads(json.dumps(one.to_dict())))
    assert again == one
    assert dict(secrets.fields(one)) == {
        "data_args.db.hosts.1": ("shop_db", "password"),
        "model_args.token": ("hub", "token"),
    }
    values = {("shop_db", "password"): "open sesame"}
    assert secrets.filled(one.data_args, values.__getitem__, "data_args") == {
        "db": {"hosts": ["h", "open sesame"], "user": "ann"}
    }
    with pytest.raises(InvalidSweepError, match=r"model_args\.token is the token of connection 'hub'"):
        secrets.filled(one.model_args, values.__getitem__, "model_args")
    varied = grid(dataclasses.replace(one, name="{lr}", model_args={}), lr=[0.1, 0.2])
    assert [dict(secrets.fields(each)) for each in varied] == [
        {"data_args.db.hosts.1": ("shop_db", "password")}
    ] * 2


def test_the_definition_holds_the_reference() -> None:
    before = Definition.of(job(data_args={"password": PASSWORD}))
    assert before.hash == Definition.of(job(data_args={"password": PASSWORD}, connections=["other"])).hash
    after = Definition.of(job(data_args={"password": Secret("other_db", "password")}))
    (change,) = before.changes(after)
    assert str(change) == (
        'data_args.password.from_connection was ["shop_db", "password"] and is ["other_db", "password"]'
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"from_connection": "shop_db"},
        {"from_connection": ["shop_db"]},
        {"from_connection": ["shop_db", ""]},
        {"from_connection": ["a=b", "password"]},
        {"from_connection": ["shop_db", "password"], "and": "more"},
        {"from_connection": [1, 2]},
    ],
)
def test_damaged_references_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidSweepError, match=r"data_args\.db is no secret; write Secret"):
        job(data_args={"db": wrong})


def test_wrong_names_are_refused() -> None:
    with pytest.raises(InvalidSweepError, match="Secret"):
        Secret("", "password")
    with pytest.raises(InvalidSweepError, match=r"'a': connections is 'shop_db'; give a list"):
        job(connections="shop_db")
    with pytest.raises(InvalidSweepError, match="connections"):
        job(connections=["a=b"])


LOOKS_LIKE_ONE = {
    "password": "x",
    "dbPassword": "x",
    "API_KEY": "abc",
    "apikey": "abc",
    "hf_token": "hf_abcdefghijkl",
    "aws_secret_access_key": "abc",
    "client_secret": "abc",
    "auth": {"user": "ann", "value": "x"},
    "url": "postgresql://ann:sesame@db/shop",
    "rendered": "{{ conn.shop_db.password }}",
    "list": [{"passwd": "x"}],
}
IS_NONE = {
    "tokenizer": "gpt2-tokenizer-large",
    "max_tokens": 512,
    "pad_token": "<|endoftext|>",
    "eos_token": "[SEP]",
    "token_type": "a-long-token-type",
    "key": "name_of_a_column",
    "primary_key": "customer_number",
    "day": "{{ ds }}",
    "url": "https://example.com:8080/data?user=ann",
    "password": PASSWORD,
    "passwords": "shop.data:passwords",
    "secret": "",
    "author": "ann",
}


@pytest.mark.parametrize("name", LOOKS_LIKE_ONE)
def test_what_looks_like_a_secret_is_named_and_hidden(name: Any) -> None:
    given = {"outer": {name: LOOKS_LIKE_ONE[name]}, "rows": 5}
    (place, *_) = clear_secrets.places(given, "data_args")
    assert place.startswith(f"data_args.outer.{name}")
    shown = json.dumps(clear_secrets.shown(given))
    assert "***" in shown
    for text in clear_secrets.texts(given):
        assert json.dumps(text) not in shown
    with pytest.raises(InvalidSweepError, match="was not written down, since it looks like a secret"):
        secrets.filled(clear_secrets.left_out(given), {}.__getitem__, "model_args")  # type: ignore[arg-type]
    message = next(clear_secrets.warnings([job(data_args={name: LOOKS_LIKE_ONE[name]})]))
    assert f"data_args.{name}" in message
    assert "Secret(" in message


@pytest.mark.parametrize("name", IS_NONE)
def test_what_does_not_is_left_alone(name: Any) -> None:
    given = {name: IS_NONE[name]}
    assert clear_secrets.places(given, "data_args") == []
    assert clear_secrets.shown(given) == given


def test_one_warning_for_all_jobs_that_have_it() -> None:
    jobs = grid(
        Job("{lr}", load_model="m:f", load_dataloader="d:f", data_args={"password": "x"}), lr=[1, 2, 3]
    )
    (message,) = clear_secrets.warnings(jobs)
    assert "(and 2 more): data_args.password" in message
