"""What a run is handed besides its spec: secrets, from one process's memory to another's.

Whoever starts the run writes them into a file that is in memory only (memfd_create(2)), which the supervisor
inherits, reads and closes. It keeps them for as long as the run lasts and gives them to the processes it
launches over their pipes. They are in no environment that a process begins with, and in no file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import quote

from saturn_airflow.model import secrets
from saturn_airflow.model.clear_secrets import HIDDEN
from saturn_airflow.model.errors import JobError

#: What Airflow looks for connections under, in the environment.
CONNECTION = "AIRFLOW_CONN_"
# What is shorter would be hidden in every second word.
_SHORTEST = 5
# What of an event, or in it, is for people to read; the rest is read by programs, and must stay as it is.
_READ_BY_PEOPLE = ("reason", "traceback", "message", "params", "tags", "verdict", "verdicts", "why", "error")


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

    Airflow's ``BaseHook.get_connection`` finds the connections, and what is printed hides what is secret. Of
    a process that ends by a fault, no image of its memory is left.
    """
    keep(handed)
    os.environ.update({CONNECTION + name.upper(): text for name, text in handed.connections.items()})
    if handed:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = map(_hiding, before)
        for handler in _log_handlers():  # libraries that were imported before the fork have such
            if handler.stream in before:
                handler.setStream(sys.stdout if handler.stream is before[0] else sys.stderr)


def _log_handlers() -> Iterator[logging.StreamHandler[Any]]:
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler


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
    return dict(_hidden_in(event, False)) if _kept.hidden else dict(event)


def _hidden_in(value: Any, told: bool) -> Any:
    """``value`` without secrets where it is ``told`` to people, as all that is below such a name is."""
    if isinstance(value, Mapping):
        return {key: _hidden_in(item, told or key in _READ_BY_PEOPLE) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden_in(item, told) for item in value]
    return hidden(value) if told and isinstance(value, str) else value


def is_in(data: bytes) -> bool:
    """Whether a secret of this process stands in ``data`` as it is."""
    return any(len(text) >= _SHORTEST and text.encode() in data for text in _kept.hidden)


def taken_out(text: str) -> list[Any] | None:
    """``text`` in parts, with the references of secrets in their places; None where it has none.

    For what is kept on disk of a job's own objects, which may hold what they were given.

    :raises JobError: when it has a secret of which there is no reference among the job's arguments.
    """
    if not _kept.hidden or hidden(text) == text:
        return None
    fields = {str(value): list(key) for key, value in _kept.values.items() if str(value) in _kept.hidden}
    longest_first = sorted(fields, key=len, reverse=True)
    pattern = "|".join(re.escape(value) for value in longest_first if len(value) >= _SHORTEST)
    parts = re.split(f"({pattern})", text) if pattern else [text]
    found = [fields[part] if number % 2 else part for number, part in enumerate(parts) if part]
    if any(isinstance(part, str) and hidden(part) != part for part in found):
        raise JobError("it has a secret in it, which no checkpoint may hold")
    return found


def put_back(parts: Sequence[Any]) -> str:
    """The text that :func:`taken_out` was given, with the values that secrets have now.

    :raises JobError: naming a secret that this process was not handed.
    """
    found = []
    for part in parts:
        if not isinstance(part, str) and tuple(part) not in _kept.values:
            raise JobError(
                f"the checkpoint refers to {part[1]} of connection {part[0]!r}, which the job has not"
            )
        found.append(part if isinstance(part, str) else str(_kept.values[tuple(part)]))
    return "".join(found)


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
