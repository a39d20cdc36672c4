"""Values among a job's arguments that look like secrets: told by name, and never shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from saturn_airflow.model.jobs import Job
from saturn_airflow.model.secrets import LEFT_OUT, is_secret

HIDDEN = "***"
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
#: Last words of names whose texts are secrets.
_NAMES = ("password", "passwd", "passphrase", "pwd", "secret", "credential", "credentials", "apikey", "auth")
_PAIRS = ("api key", "access key", "private key", "secret key", "account key", "connection string")
_LAST_TWO = tuple(tuple(pair.split()) for pair in _PAIRS)
# Tokens of texts are no secrets; those of logins are long and have no brackets.
_TOKEN = re.compile(r"^[^\s<>\[\]|{}]{12,}$")
_LOGIN_IN_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)
_TEMPLATE = re.compile(r"{{.*\b(conn|var)\b.*}}", re.DOTALL)


def places(arguments: Any, what: str) -> list[str]:
    """Where a value stands that looks like a secret, such as ``data_args.db.password``.

    :param what: the place of ``arguments``.
    """
    found: list[str] = []

    def note(place: str) -> str:
        found.append(place)
        return HIDDEN

    _replaced(arguments, what, False, note)
    return found


def texts(arguments: Any) -> list[str]:
    """The values that look like secrets."""
    found: list[str] = []
    _replaced(arguments, "", False, lambda place: "", found.append)
    return found


def shown(arguments: Any) -> Any:
    """``arguments`` as people may see them."""
    return _replaced(arguments, "", False, lambda place: HIDDEN)


def left_out(arguments: Any) -> Any:
    """``arguments`` as a file may keep them; who needs what was left out is told of it."""
    return _replaced(arguments, "", False, lambda place: dict(LEFT_OUT))


def warnings(jobs: Sequence[Job]) -> Iterator[str]:
    """What to say of jobs that have secrets in clear."""
    jobs_with: dict[str, list[str]] = {}
    for job in jobs:
        for what in ("model_args", "data_args"):
            for place in places(getattr(job, what), what):
                jobs_with.setdefault(place, []).append(job.name)
    for place, names in jobs_with.items():
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        yield (
            f"job {names[0]!r}{others}: {place} looks like a secret and is given in clear, so it is in "
            "Airflow's database and in files of the shared folder; keep it in a connection and write "
            "Secret('conn_id', 'password') in its place"
        )


def _replaced(
    value: Any,
    place: str,
    is_named: bool,
    put: Callable[[str], Any],
    tell: Callable[[str], object] = lambda text: None,
) -> Any:
    """``value`` with what ``put`` gives in the places of secrets.

    :param is_named: whether what it is called, or what it is part of, is called like a secret.
    """
    if is_secret(value):
        return value
    if isinstance(value, Mapping):
        return {
            key: _replaced(item, f"{place}.{key}", is_named or _is_name(str(key), item), put, tell)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(item, f"{place}.{n}", is_named, put, tell) for n, item in enumerate(value)]
    if isinstance(value, str) and value and (is_named or _LOGIN_IN_URL.search(value) or _is_template(value)):
        tell(value)
        return put(place)
    return value


def _is_name(name: str, value: Any) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    if words[-1] in ("token", "key") and isinstance(value, str):
        secret = words[-1] == "token" or tuple(words[-2:]) in _LAST_TWO
        return secret and bool(words[-1] == "key" or _TOKEN.match(value))
    return words[-1] in _NAMES or tuple(words[-2:]) in _LAST_TWO


def _is_template(text: str) -> bool:
    """Whether Airflow is to put a connection or a variable there, which it would do in clear."""
    found = _TEMPLATE.search(text)
    return found is not None and any(word in found[0] for word in ("password", "extra", "get_uri", "secret"))
