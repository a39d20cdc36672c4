"""Looking up the secrets of jobs in Airflow's connections."""

from __future__ import annotations

import json
from typing import Any

import pytest

from saturn_airflow import InvalidSweepError, Job, Secret
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
