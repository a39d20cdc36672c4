"""Jobs that differ from one in some values: where each value belongs, and what the jobs are called."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import HParams, Job

_HPARAMS = tuple(f.name for f in dataclasses.fields(HParams))
#: Mappings whose values a dotted name can vary.
_MAPPINGS = ("optimizer_args", "lr_scheduler_args", "model_args", "data_args")


class Variations:
    """What may vary of a job, by names that are hyper-parameters, keys of its arguments, or dotted.

    :param what: who asks, as messages name it.
    :raises InvalidSweepError: for something that is no job, or a key that is nowhere to be put.
    """

    def __init__(self, job: Job, keys: Iterable[str], what: str) -> None:
        if not isinstance(job, Job):
            raise InvalidSweepError(f"{what}: give one Job and what varies of it, not a {type(job).__name__}")
        self._job = job
        self._what = what
        for key in keys:
            self._check_key(key)

    def _check_key(self, key: str) -> None:
        job = self._job
        first, _, rest = key.partition(".")
        if rest and first in _MAPPINGS:
            return
        if key not in _HPARAMS and key not in job.model_args and key not in job.data_args:
            last = key.rpartition(".")[2]
            raise InvalidSweepError(
                f"{self._what}: {key!r} is no hyper-parameter ({', '.join(sorted(_HPARAMS))}) and no key of "
                "the job's model_args or data_args; an argument of load_model needs a value there, as in "
                f"model_args={{{last!r}: ...}}, and what is inside a mapping is given as "
                f"{{'optimizer_args.{last}': [...]}}, before the keyword arguments"
            )

    def job(self, values: Mapping[str, Any], in_name: Mapping[str, Any] | None = None) -> Job:
        """The job with these values.

        :param in_name: what else placeholders of its name may stand for.
        """
        hparams = {key: value for key, value in values.items() if key in _HPARAMS}
        if "batches" in hparams:
            hparams.setdefault("epochs", None)
        if "epochs" in hparams:
            hparams.setdefault("batches", None)
        job = self._job
        changed: dict[str, Any] = {
            "model_args": {key: values.get(key, value) for key, value in job.model_args.items()},
            "data_args": {key: values.get(key, value) for key, value in job.data_args.items()},
        }
        for key, value in values.items():
            first, *path = key.split(".")
            if path:
                holder = changed if first in changed else hparams
                before = holder[first] if first in holder else getattr(job.hparams, first)
                holder[first] = self._put(before, path, value, key)
        return dataclasses.replace(
            job,
            name=self._name(values, in_name or {}),
            hparams=dataclasses.replace(job.hparams, **hparams),
            **changed,
        )

    def _put(self, mapping: Any, path: Sequence[str], value: Any, key: str) -> dict[str, Any]:
        """A copy of ``mapping`` with ``value`` where ``path`` leads."""
        if not isinstance(mapping, Mapping):
            raise InvalidSweepError(f"{self._what}: {key!r} leads into {mapping!r:.60}, which is no mapping")
        first, *rest = path
        put = self._put(mapping.get(first, {}), rest, value, key) if rest else value
        return {**mapping, first: put}

    def _name(self, values: Mapping[str, Any], in_name: Mapping[str, Any]) -> str:
        job = self._job
        short = {key.rpartition(".")[2]: value for key, value in values.items()}
        named = {**in_name, **vars(job.hparams), **job.data_args, **job.model_args, **short, **values}
        try:
            return _Names().vformat(job.name, (), named)
        except KeyError as error:
            raise InvalidSweepError(
                f"{self._what}: the name {job.name!r} has {{{error.args[0]}}}, which is neither varied nor "
                "given"
            ) from None
        except ValueError as error:
            raise InvalidSweepError(f"{self._what}: the name {job.name!r} can't be filled: {error}") from None

    def in_name(self) -> set[str]:
        """The placeholders in the job's name."""
        return {key for _, key, _, _ in string.Formatter().parse(self._job.name) if key}

    def check_names(self, jobs: Sequence[Job], hint: str) -> None:
        """:raises InvalidSweepError: when two jobs have one name, ending with ``hint``."""
        names = [job.name for job in jobs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidSweepError(f"{self._what}: several jobs would be named {twice!r}; {hint}")


class _Names(string.Formatter):
    """Fills placeholders; a dot in one is part of the name of what is varied."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[field_name], field_name
