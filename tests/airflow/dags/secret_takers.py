"""Functions of jobs that take secrets, and know the right ones by their digest."""

from __future__ import annotations

import hashlib
import logging
import warnings

import faulty
import mlflow

#: Of what the connection ``shop_db`` has.
PASSWORD_DIGEST = "89b85bd062ec9d6a80fd648e43eb000c3ec6dc31a49ba7b1ffd1f241cbd71085"


def model(password, token):
    print(f"logs in with {password} and {token}")
    warnings.warn(f"soon there is no login with {password!r} any more", stacklevel=1)
    logging.getLogger("shop").error("a token %r was taken", token)
    mlflow.log_param("token", token)
    mlflow.set_tag("login", f"{password!r} or {token}")
    _check(password, token)
    return faulty.linear()


def points(database, **arguments):
    from airflow.sdk import BaseHook

    connection = BaseHook.get_connection("shop_db")
    print(f"asked Airflow: {connection.password}")
    _check(connection.password, connection.extra_dejson["api_token"])
    _check(database["password"], connection.extra_dejson["api_token"])
    return faulty.points(**arguments)


def fails(password, token):
    try:
        raise KeyError(password)
    except KeyError as error:
        raise ConnectionError(f"can't log in to {token} with {password}") from error


def _check(*values):
    assert hashlib.sha256("|".join(values).encode()).hexdigest() == PASSWORD_DIGEST, "another secret"
