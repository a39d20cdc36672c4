"""What a run is handed besides its spec: secrets, from one process's memory to another's.

Whoever starts the run writes them into a file that is in memory only (memfd_create(2)), which the supervisor
inherits, reads and closes. It keeps them for as long as the run lasts and gives them to the processes it
launches over their pipes. They are in no environment that a process begins with, and in no file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import quote

from saturn_airflow.model import secrets
from saturn_airflow.model.clear_secrets import HIDDEN

#: What Airflow looks for connections under, in the environment.
CONNECTION = "AIRFLOW_CONN_"
# What is shorter would be hidden in every second word.
_SHORTEST = 5
# What of an event is for people to read; the rest is read by programs, and must stay as it is.
_READ_BY_PEOPLE = ("reason", "traceback", "message", "params", "tags")


@dataclass(frozen=True)
class HandedOver:
    """Secrets for one run.

    :param values: of each reference among the job's arguments.
    :param connections: whole connections as Airflow's JSON, by id.
    :param hidden: texts that nothing the run says may contain.
    """

    values: Mapping[secrets.Field, Any] = field(default_factory=dict, repr=False)
    connections: Mapping[str, str] = field(default_factory=dict, repr=False)
    hidden: Sequence[str] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.values or self.connections)


NOTHING = HandedOver()
_kept = NOTHING


@contextmanager
def as_file(handed: HandedOver) -> Iterator[list[int]]:
    """An open file in memory to be inherited, for :func:`read`; none where nothing is handed over."""
    if not handed:
        yield []
        return
    file = os.memfd_create("saturn", os.MFD_CLOEXEC)
    try:
        values = [[*key, value] for key, value in handed.values.items()]
        data = json.dumps([values, dict(handed.connections), list(handed.hidden)]).encode()
        while data:
            data = data[os.write(file, data) :]
        yield [file]
    finally:
        os.close(file)


def read(files: Sequence[int]) -> HandedOver:
    """What :func:`as_file` wrote; the file is closed."""
    if not files:
        return NOTHING
    (file,) = files
    try:
        data = os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
    values, connections, hidden = json.loads(data)
    return HandedOver({(conn_id, name): value for conn_id, name, value in values}, connections, hidden)


def keep(handed: HandedOver) -> None:
    """Keep it in this process, for those that it launches."""
    global _kept
    _kept = handed


def kept() -> HandedOver:
    """What this process was handed."""
    return _kept


def receive(handed: HandedOver) -> None:
    """Make use of it in this process, which runs the job's code.

    Airflow's ``BaseHook.get_connection`` finds the connections, and what is printed hides what is secret.
    """
    keep(handed)
    os.environ.update({CONNECTION + name.upper(): text for name, text in handed.connections.items()})
    if handed:
        sys.stdout, sys.stderr = _hiding(sys.stdout), _hiding(sys.stderr)


def arguments(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A job's arguments with its secrets in their places.

    :param what: how messages name them, such as ``model_args``.
    :raises InvalidSweepError: naming a secret that this process was not handed.
    """
    values = _kept.values
    found: dict[str, Any] = secrets.filled(given, lambda key: values[key], what)
    return found


def hidden(text: str) -> str:
    """``text`` without the secrets of this process, as they are and as JSON, Python and URLs write them."""
    for secret in _kept.hidden:
        if len(secret) >= _SHORTEST:
            forms = {
                secret,
                json.dumps(secret)[1:-1],
                repr(secret)[1:-1],
                quote(secret),
                quote(secret, safe=""),
            }
            for form in sorted(forms, key=len, reverse=True):
                text = text.replace(form, HIDDEN)
    return text


def hidden_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event without the secrets of this process in what people read of it."""
    if not _kept.hidden:
        return dict(event)
    return {key: _hidden_in(value) if key in _READ_BY_PEOPLE else value for key, value in event.items()}


def _hidden_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hidden_in(item) for key, item in value.items()}
    return hidden(value) if isinstance(value, str) else value


class _Hiding:
    """A text stream that hides what is secret."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hidden(text))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _hiding(stream: TextIO) -> Any:
    return stream if isinstance(stream, _Hiding) else _Hiding(stream)
