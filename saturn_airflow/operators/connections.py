"""Looking up the secrets of jobs: in Airflow's connections, by whatever backend it has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from saturn_airflow.launch.handed_over import HandedOver
from saturn_airflow.model import clear_secrets, json_text, secrets
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job
from saturn_airflow.operators.airflow_internals import mask

# Shorter lines of a secret may be words like any.
_LONG_LINE = 16
# Who is told of these knows no secret.
_NO_SECRETS = ("host", "port", "schema", "login")


def handed_to(*jobs: Job) -> HandedOver:
    """The secrets that the arguments of ``jobs`` refer to, and the connections that their code may ask for.

    They are hidden in the log of this task.

    :raises InvalidSweepError: naming a connection that is not there, or the field that it lacks.
    """
    values: dict[secrets.Field, Any] = {}
    whole: dict[str, str] = {}
    with_password = set[str]()
    found: dict[str, Any] = {}

    def connection(conn_id: str, what: str) -> Any:
        if conn_id not in found:
            try:
                found[conn_id] = BaseHook.get_connection(conn_id)
            except AirflowNotFoundException:
                raise InvalidSweepError(
                    f"{what} is of connection {conn_id!r}, which Airflow does not have; add it (Admin, "
                    "Connections), or to the secrets backend"
                ) from None
        return found[conn_id]

    for job in jobs:
        for place, key in secrets.fields(job):
            what = f"job {job.name!r}: {place}"
            values[key] = _value(connection(key[0], what), key[1], what)
            with_password |= {key[0]} if key[1] == "uri" else set()
        for conn_id in job.connections:
            whole[conn_id] = connection(conn_id, f"job {job.name!r}: connections").as_json()
    own = [value for (_, name), value in values.items() if name not in _NO_SECRETS]
    secret = [str(value) for value in own] + [json.dumps(value) for value in own if isinstance(value, dict)]
    for used in (found[conn_id] for conn_id in (*whole, *with_password)):
        secret += filter(None, [used.password, *clear_secrets.texts(used.extra_dejson)])
    hidden = tuple(dict.fromkeys(part for text in secret for part in _parts_of(text)))
    for text in hidden:
        mask(text)
    return HandedOver(values, whole, hidden)


def _parts_of(secret: str) -> Iterator[str]:
    """What of a secret is one by itself: all of it, the lines of a key, and what is secret in a JSON file."""
    yield secret
    lines = secret.splitlines()
    yield from (line for line in lines if len(lines) > 1 and len(line) >= _LONG_LINE)
    with suppress(ValueError):
        inside = json_text.parse(secret)
        if isinstance(inside, Mapping):
            for text in clear_secrets.texts(inside):
                yield from _parts_of(text)


def _value(connection: Any, name: str, what: str) -> Any:
    extras = connection.extra_dejson
    if name == "uri":
        return connection.get_uri()
    value = getattr(connection, name) if name in secrets.FIELDS else extras.get(name)
    if value is None:
        more = f", and extras {', '.join(extras)}" if extras else ", and no extras"
        raise InvalidSweepError(
            f"{what} is the {name} of connection {connection.conn_id!r}, which has none; a connection has "
            f"{', '.join(secrets.FIELDS)}{more}"
        )
    return value
