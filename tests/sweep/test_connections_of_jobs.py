"""Looking up the secrets of jobs in Airflow's connections."""

from __future__ import annotations

import json
from typing import Any

import pytest

from saturn_airflow import InvalidSweepError, Job, Secret
from saturn_airflow.launch import handed_over
from saturn_airflow.operators.connections import handed_to

TOKEN = "token-of-the-shop"


@pytest.fixture(autouse=True)
def shop_db(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"conn_type": "postgres", "host": "db", "port": 5432, "login": "ann", "password": "sesame"}
    extra = {"region": "north", "api_token": TOKEN}
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", json.dumps({**fields, "extra": extra}))


def job(**given: Any) -> Any:
    return Job("a", load_model="shop.models:gpt2", load_dataloader="shop.data:rows", **given)


def test_every_field_and_extra_can_be_had() -> None:
    names = ("password", "host", "port", "api_token", "uri")
    args = {name: Secret("shop_db", name) for name in names}
    found = handed_to(job(data_args=args))
    assert [found.values["shop_db", name] for name in names[:4]] == [
        "sesame",
        "db",
        5432,
        "token-of-the-shop",
    ]
    assert found.values["shop_db", "uri"].startswith("postgres://ann:sesame@db:5432")
    assert found.connections == {}
    assert {"sesame", "token-of-the-shop"} <= set(found.hidden)
    assert "db" not in found.hidden


def test_whole_connections_are_handed_over_and_what_is_secret_of_them_is_hidden() -> None:
    found = handed_to(job(connections=["shop_db"]))
    assert json.loads(found.connections["shop_db"])["extra"]["region"] == "north"
    assert set(found.hidden) == {"sesame", "token-of-the-shop"}
    assert not handed_to(job())


def test_what_is_secret_within_a_secret_is_hidden_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code takes them apart: the password of an address, the key in a file, its lines, one by one."""
    lines = ("MIIEvQIBADANBgkqhkiG9w0B", "AQEFAASCBKcwggSjAgEAAoIB")
    key = "\n".join(("-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", ""))
    file = {"client_email": "ann@shop", "private_key": key}
    extra = {"as_text": json.dumps(file), "as_data": file}
    fields = {"conn_type": "postgres", "host": "db", "password": "p@ss word", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", json.dumps(fields))
    found = handed_to(job(data_args={"x": Secret("shop_db", "uri")}))
    assert "p@ss word" in found.hidden
    for name in ("as_text", "as_data"):
        handed = handed_to(job(data_args={"x": Secret("shop_db", name)}))
        assert {key, *lines} <= set(handed.hidden)
        assert "ann@shop" not in handed.hidden
        monkeypatch.setattr(handed_over, "_kept", handed)
        shown = handed_over.hidden(f"{json.dumps(file)} {file} {key.splitlines()[1]}")
        assert "MIIEvQ" not in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"data_args": {"x": Secret("no_db", "password")}},
            r"job 'a': data_args\.x is of connection 'no_db'",
        ),
        (
            {"connections": ["no_db"]},
            r"job 'a': connections is of connection 'no_db', which Airflow does not",
        ),
        (
            {"data_args": {"x": Secret("shop_db", "passwort")}},
            r"'shop_db'.*none; .*extras region, api",
        ),
        (
            {"data_args": {"x": Secret("shop_db", "schema")}},
            r"the schema of connection 'shop_db'",
        ),
    ],
)
def test_what_is_missing_is_named(given: Any, message: Any) -> None:
    with pytest.raises(InvalidSweepError, match=message):
        handed_to(job(**given))
