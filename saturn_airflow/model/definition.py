"""A job's definition: all that decides its result, as a hash and as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model.early_stopping import EarlyStopping
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.metrics import PART

_TOLD = ("on_step", "on_epoch")  # who are told of what happens
#: Fields of a job that decide where it is trained, how fast, and what is measured, and not what comes of it.
_WITHOUT_EFFECT = (
    *("name", "techniques", "nodes", "neutral", "trust", "exact", "metrics", "init_missing", "connections"),
    *_TOLD,
)
_NUMBERS = ("lr", "clip_grad_norm")
_NOT_GIVEN = object()
# Characters of a value in a message.
_LONGEST = 80
#: The field that holds the version of the user's code.
CODE = "code"


@dataclass(frozen=True)
class Change:
    """A field that differs between two definitions, such as ``hparams.lr``, and its values as text."""

    field: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.field} was {self.before} and is {self.now}"


@dataclass(frozen=True)
class Definition:
    """What decides a job's result.

    :param fields: JSON-ready. What is at its default is left out, so that a field which a later version adds
        changes the definition of no job that does not use it; hence a default must never change.
    """

    fields: Mapping[str, Any]

    @classmethod
    def of(cls, job: Job, code: str | None = None) -> Definition:
        """The definition of ``job``.

        :param code: the version of the user's code, where it has one.
        """
        fields = {key: value for key, value in job.fields().items() if key not in _WITHOUT_EFFECT}
        hparams = dict(fields.pop("hparams", {}))
        hparams |= {key: float(hparams[key]) for key in _NUMBERS if hparams.get(key) is not None}
        if hparams.get("epochs") == 1:  # what it is where nothing is said
            del hparams["epochs"]
        fields |= {"hparams": hparams} if hparams else {}
        if ends_it := _metric_that_ends(job):
            fields["metrics"] = ends_it
        return cls(fields | ({CODE: code} if code is not None else {}))

    @property
    def hash(self) -> str:
        """16 hexadecimal digits of all fields."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:16]

    def changes(self, now: Definition) -> list[Change]:
        """What differs in ``now``; nothing where they define the same.

        The version of the code counts where both have one: who could not be asked for it has not changed it.
        So do metrics, which earlier versions did not note.
        """
        old, new = dict(_leaves(self.fields)), dict(_leaves(now.fields))
        for field in (CODE, "metrics"):
            if not (field in self.fields and field in now.fields):
                old = {path: value for path, value in old.items() if path[0] != field}
                new = {path: value for path, value in new.items() if path[0] != field}
        return [
            Change(".".join(path), _shown(old.get(path, _NOT_GIVEN)), _shown(new.get(path, _NOT_GIVEN)))
            for path in sorted(old.keys() | new.keys())
            if _text(old.get(path, _NOT_GIVEN)) != _text(new.get(path, _NOT_GIVEN))
        ]

    def to_dict(self) -> dict[str, Any]:
        """This definition as JSON-ready data, with its hash."""
        return {"hash": self.hash, "fields": dict(self.fields)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Definition:
        """The definition that :meth:`to_dict` described."""
        return cls(data["fields"])


def _metric_that_ends(job: Job) -> dict[str, str]:
    """The metric of the job's own that decides when it ends, if one does."""
    rule = EarlyStopping.of(job.hparams.early_stopping)
    named = "" if rule is None else rule.metric
    return {
        name: str(reference)
        for name, reference in job.metrics.items()
        if named == name or named.startswith(f"{name}{PART}")
    }


def _leaves(fields: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _text(value: Any) -> str:
    return "not given" if value is _NOT_GIVEN else json.dumps(value, sort_keys=True)


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
