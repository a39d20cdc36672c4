"""Grids of jobs: every combination of the values that users vary."""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from saturn_airflow.model.arguments import plain
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import HParams, Job

_HPARAMS = tuple(f.name for f in dataclasses.fields(HParams))
#: Mappings whose values a dotted name can vary.
_MAPPINGS = ("optimizer_args", "lr_scheduler_args", "model_args", "data_args")


def grid(
    job: Job, dotted: Mapping[str, Iterable[Any]] | None = None, /, **values: Iterable[Any]
) -> list[Job]:
    """Every combination of ``values``, each as a job of its own.

    A key is a hyper-parameter, or a key that ``job.model_args`` or ``job.data_args`` already has. The
    placeholders in the job's name are filled with the values: ``"gpt2-{lr}-{batch_size}"``.

    :param dotted: the same for keys with dots, which reach into a mapping: ``{"optimizer_args.weight_decay":
        [0.0, 0.1], "model_args.config.layers": [2, 4]}``. In names the last part is enough:
        ``"gpt2-{weight_decay}"``.
    :raises InvalidSweepError: for a key that is nowhere to be put, no values, or names that come out equal.
    """
    if not isinstance(job, Job):
        raise InvalidSweepError(f"grid: give one Job and lists of values, not a {type(job).__name__}")
    varied = {**(dotted or {}), **values}
    for key, choices in varied.items():
        if isinstance(choices, str | Mapping) or not isinstance(choices, Iterable):
            raise InvalidSweepError(f"grid: {key} is {choices!r:.80}; give a list of values")
        _check_key(job, key)
    choices_of = {key: [plain(choice) for choice in choices] for key, choices in varied.items()}
    if empty := [key for key, choices in choices_of.items() if not choices]:
        raise InvalidSweepError(f"grid: {empty[0]} has no values")
    jobs = [
        _with_values(job, dict(zip(choices_of, combination, strict=True)))
        for combination in itertools.product(*choices_of.values())
    ]
    _check_names(job, jobs, choices_of)
    return jobs


def _check_key(job: Job, key: str) -> None:
    first, _, rest = key.partition(".")
    if rest and first in _MAPPINGS:
        return
    if key not in _HPARAMS and key not in job.model_args and key not in job.data_args:
        raise InvalidSweepError(
            f"grid: {key!r} is no hyper-parameter ({', '.join(sorted(_HPARAMS))}) and no key of the job's "
            f"model_args or data_args; for what is inside a mapping write "
            f"grid(job, {{'optimizer_args.{key.rpartition('.')[2]}': [...]}})"
        )


def _check_names(job: Job, jobs: Sequence[Job], choices_of: Mapping[str, Sequence[Any]]) -> None:
    names = [j.name for j in jobs]
    if len(set(names)) == len(names):
        return
    in_name = {key for _, key, _, _ in string.Formatter().parse(job.name) if key}
    missing = [
        key
        for key, choices in choices_of.items()
        if len(choices) > 1 and not in_name & {key, key.rpartition(".")[2]}
    ]
    hint = "".join(f"-{{{key.rpartition('.')[2]}}}" for key in missing)
    raise InvalidSweepError(
        f"grid: several jobs would be named {next(n for n in names if names.count(n) > 1)!r}; "
        + (f"name the job '{job.name}{hint}'" if missing else "a value stands twice in the grid")
    )


class _Names(string.Formatter):
    """Fills placeholders; a dot in one is part of the name of what is varied."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[field_name], field_name


def _name(job: Job, values: Mapping[str, Any]) -> str:
    short = {key.rpartition(".")[2]: value for key, value in values.items()}
    named = {**vars(job.hparams), **job.data_args, **job.model_args, **short, **values}
    try:
        return _Names().vformat(job.name, (), named)
    except KeyError as error:
        raise InvalidSweepError(
            f"grid: the name {job.name!r} has {{{error.args[0]}}}, which is neither varied nor given"
        ) from None
    except ValueError as error:
        raise InvalidSweepError(f"grid: the name {job.name!r} can't be filled: {error}") from None


def _with_values(job: Job, values: Mapping[str, Any]) -> Job:
    name = _name(job, values)
    hparams = {key: value for key, value in values.items() if key in _HPARAMS}
    if "batches" in hparams:
        hparams.setdefault("epochs", None)
    if "epochs" in hparams:
        hparams.setdefault("batches", None)
    changed: dict[str, Any] = {
        "model_args": {key: values.get(key, value) for key, value in job.model_args.items()},
        "data_args": {key: values.get(key, value) for key, value in job.data_args.items()},
    }
    for key, value in values.items():
        first, *path = key.split(".")
        if path:
            holder = changed if first in changed else hparams
            before = holder[first] if first in holder else getattr(job.hparams, first)
            holder[first] = _put(before, path, value, key)
    return dataclasses.replace(job, name=name, hparams=dataclasses.replace(job.hparams, **hparams), **changed)


def _put(mapping: Any, path: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    """A copy of ``mapping`` with ``value`` where ``path`` leads."""
    if not isinstance(mapping, Mapping):
        raise InvalidSweepError(f"grid: {key!r} leads into {mapping!r:.60}, which is no mapping")
    first, *rest = path
    return {**mapping, first: _put(mapping.get(first, {}), rest, value, key) if rest else value}
