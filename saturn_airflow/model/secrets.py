"""Secrets among a job's arguments: references to fields of Airflow's connections, in the place of values.

Such a reference is plain data, ``{"from_connection": ["shop_db", "password"]}``, so that a job fits in JSON
wherever it goes. Its value is looked up in the task and handed to the processes that train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from saturn_airflow.model.errors import InvalidSweepError

#: The one key of a reference. Its value is the connection's id and the field; None where a value that looked
#: like a secret was left out of a file.
MARK = "from_connection"
LEFT_OUT: Mapping[str, Any] = {MARK: None}
#: Fields of a connection; any other is a key of its extras.
FIELDS = ("host", "login", "password", "port", "schema", "uri")

Field = tuple[str, str]


class TakesSecrets(Protocol):
    """What of a :class:`~saturn_airflow.model.jobs.Job` may hold references."""

    @property
    def name(self) -> str: ...
    @property
    def model_args(self) -> Mapping[str, Any]: ...
    @property
    def data_args(self) -> Mapping[str, Any]: ...
    @property
    def connections(self) -> Sequence[str]: ...


def Secret(conn_id: str, field: str) -> dict[str, Any]:  # noqa: N802 - written like Job and HParams
    """A value in ``model_args`` or ``data_args`` that stays in an Airflow connection until a job is trained.

    :param conn_id: the connection, of Airflow's own or of its secrets backend.
    :param field: ``host``, ``login``, ``password``, ``port``, ``schema``, ``uri``, or a key of its extras.
    :raises InvalidSweepError: for anything but names.
    """
    reference = {MARK: [conn_id, field]}
    _field_of(reference, f"Secret({conn_id!r}, {field!r})")
    return reference


def is_secret(value: Any) -> bool:
    """Whether it stands for a value, rather than being one."""
    return isinstance(value, Mapping) and MARK in value


def fields(job: TakesSecrets) -> Iterator[tuple[str, Field]]:
    """The references among a job's arguments, each behind its place, such as ``data_args.db.password``.

    :raises InvalidSweepError: for one that is damaged.
    """
    for name in ("model_args", "data_args"):
        for place, found in _secrets(getattr(job, name), name):
            if found[MARK] is not None:
                yield place, _field_of(found, place)


def filled(arguments: Any, value_of: Callable[[Field], Any], what: str) -> Any:
    """``arguments`` with values in the places of references.

    :param value_of: raises KeyError for what it does not have.
    :param what: the place of ``arguments``.
    :raises InvalidSweepError: naming the place of a reference without a value.
    """
    if is_secret(arguments):
        if arguments[MARK] is None:
            raise InvalidSweepError(
                f"{what} was not written down, since it looks like a secret; {_REPLACE.format(what)}"
            )
        conn_id, field = _field_of(arguments, what)
        try:
            return value_of((conn_id, field))
        except KeyError:
            raise InvalidSweepError(
                f"{what} is the {field} of connection {conn_id!r}, which only tasks of sweeps look up; "
                f"{_REPLACE.format(what)}"
            ) from None
    if isinstance(arguments, Mapping):
        return {key: filled(value, value_of, f"{what}.{key}") for key, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        return [filled(value, value_of, f"{what}.{place}") for place, value in enumerate(arguments)]
    return arguments


_REPLACE = "to load an exported model give load_exported(..., model_args=...) with the value of {}"


def checked_connections(job: TakesSecrets) -> tuple[str, ...]:
    """The ids of connections that the job's code may ask for, when these and its references are right.

    :raises InvalidSweepError: when they are not.
    """
    for _ in fields(job):
        pass
    given: Any = job.connections
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(isinstance(conn_id, str) and _is_id(conn_id) for conn_id in given):
        raise InvalidSweepError(
            f"job {job.name!r}: connections is {given!r}; give a list of connection ids, such as ['shop_db']"
        )
    return tuple(given)


def _secrets(value: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if is_secret(value):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _secrets(item, f"{place}.{number}")


def _field_of(reference: Mapping[str, Any], what: str) -> Field:
    given = reference[MARK]
    if (
        len(reference) != 1
        or not isinstance(given, list | tuple)
        or len(given) != 2
        or not all(isinstance(part, str) for part in given)
        or not _is_id(given[0])
        or not given[1]
    ):
        raise InvalidSweepError(f"{what} is no secret; write Secret('conn_id', 'password'), with two names")
    return given[0], given[1]


def _is_id(conn_id: str) -> bool:
    # It becomes part of an environment variable's name.
    return bool(conn_id.strip()) and "=" not in conn_id and "\0" not in conn_id
