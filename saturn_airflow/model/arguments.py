"""Keyword arguments of what users write: other names they go by, and what was likely meant by a wrong one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from saturn_airflow.model.errors import InvalidSweepError

T = TypeVar("T")

#: What other libraries call it, where it is not spelt alike.
_ELSEWHERE = {
    "accumulate_grad_batches": "accumulate",
    "dataloader": "load_dataloader",
    "dtype": "precision",
    "gpus": "devices",
    "gradient_clip_val": "clip_grad_norm",
    "learning_rate": "lr",
    "loss": "loss_function",
    "max_epochs": "epochs",
    "max_grad_norm": "clip_grad_norm",
    "model": "load_model",
    "num_epochs": "epochs",
    "num_gpus": "devices",
    "num_train_epochs": "epochs",
    "scheduler": "lr_scheduler",
    "steps": "batches",
    "train_dataloader": "load_dataloader",
    "val_dataloader": "load_eval_dataloader",
    "weight_decay": "optimizer_args",
}


def unknown(name: str, known: Iterable[str]) -> str:
    """What to say of an argument that is not there: the likely one, or all there are."""
    known = list(known)
    meant = _ELSEWHERE.get(name)
    all_known = f"known are {', '.join(known)}"
    return f"there is no {name!r}; " + (
        f"did you mean {meant!r}?" if meant in known else hint(name, known, all_known)
    )


def hint(name: object, known: Iterable[str], otherwise: str) -> str:
    """Which of ``known`` was likely meant by ``name``, or else ``otherwise``."""
    likely = difflib.get_close_matches(str(name), list(known), 1)
    return f"did you mean {likely[0]!r}?" if likely else otherwise


def fields_of(cls: Any, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """``given`` under the names of the fields of the dataclass ``cls``.

    :raises InvalidSweepError: for a name that is none, or one that is given twice.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    aliases: Mapping[str, str] = getattr(cls, "_aliases", {})
    found: dict[str, Any] = {}
    for name, value in given.items():
        field = aliases.get(name, name)
        if field not in names:
            raise InvalidSweepError(f"{what}: {unknown(name, names)}")
        if field in found:
            alias = next(alias for alias, meant in aliases.items() if meant == field)
            raise InvalidSweepError(f"{what}: {field} and {alias} are the same; give one of them")
        found[field] = value
    return found


def checked(what: str, **aliases: str) -> Callable[[type[T]], type[T]]:
    """Let a dataclass say what was likely meant by an argument it does not have.

    :param what: how messages name it.
    :param aliases: other names of fields.
    """

    def decorate(cls: type[T]) -> type[T]:
        of_any: Any = cls
        make = of_any.__init__

        @functools.wraps(make)
        def make_checked(self: T, *args: Any, **given: Any) -> None:
            named = fields_of(cls, given, what)
            _check_positions(of_any, args, named, what)
            make(self, *args, **named)

        of_any.__init__ = make_checked
        of_any._aliases = aliases
        return cls

    return decorate


def _check_positions(cls: Any, args: tuple[Any, ...], named: Mapping[str, Any], what: str) -> None:
    """Check that a dataclass is given what it needs, each by its name or in its place."""
    fields = [f for f in dataclasses.fields(cls) if f.init]
    in_order = [f.name for f in fields if not f.kw_only]
    example = next(iter(named), fields[0].name)
    if len(args) > len(in_order):
        raise InvalidSweepError(
            f"{what}: {args[len(in_order)]!r:.60} stands without a name; name each argument, as in "
            f"{cls.__name__}({example}=...)"
        )
    if twice := [name for name in in_order[: len(args)] if name in named]:
        raise InvalidSweepError(f"{what}: {twice[0]} is given twice, by its place and by its name")
    without = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [f.name for f in fields if (f.default, f.default_factory) == without]
    if lacking := [name for name in needed if name not in {*in_order[: len(args)], *named}]:
        raise InvalidSweepError(f"{what}: it needs {lacking[0]!r}; write {cls.__name__}({lacking[0]}=...)")


#: What most arguments are, which no check of abstract classes need look at: DAG files are parsed often.
_SCALARS = (bool, int, float, str, type(None))


def plain(value: Any) -> Any:
    """``value`` with numpy's scalars, also those in lists and mappings, as Python's numbers."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    # Without importing numpy.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def in_seconds(value: Any) -> Any:
    """A ``timedelta`` in seconds; anything else as it is, for whoever checks it."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def json_mapping(value: object, what: str) -> dict[str, Any]:
    """A copy of ``value``, a mapping that fits in JSON.

    :raises InvalidSweepError: when it is none.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidSweepError(f"{what} is {value!r}; give a mapping from names to values")
    try:
        # As bytes, since half of a surrogate pair is no text to Airflow.
        text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False).encode()
        copied: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InvalidSweepError(f"{what} must fit in JSON, and {value!r:.80} does not: {error}") from None
    if (refused := next(_not_for_airflow(copied), None)) is not None:
        raise InvalidSweepError(f"{what} has {refused}")
    return copied


def _not_for_airflow(value: Any) -> Iterator[str]:
    """What in JSON-ready data Airflow can't keep or tell its processes: it would drop the whole DAG file."""
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            yield f"the whole number {value}, and Airflow takes none of more than 64 bits; give a float"
    elif isinstance(value, str):
        if "\0" in value:
            yield f"the text {value!r:.80} with a NUL, which databases refuse; put it in where it is used"
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            yield from _not_for_airflow(item)
    elif isinstance(value, list):
        for item in value:
            yield from _not_for_airflow(item)


def number(value: Any, what: str) -> Any:
    """The value of a hyper-parameter, as Python's own number where it is one of numpy's.

    :raises InvalidSweepError: for a template.
    """
    if isinstance(value, str) and "{{" in value:
        raise InvalidSweepError(
            f"{what} is {value!r}, but hyper-parameters can't be templates; let an upstream task return the "
            "jobs, as dags/jobs_from_upstream.py does"
        )
    return value if type(value) in _SCALARS or isinstance(value, Mapping) else plain(value)


def is_int(value: object) -> bool:
    """Whether ``value`` is a whole number; True and False, which are numbers to Python, are none."""
    return isinstance(value, int) and not isinstance(value, bool)
