"""Global variables of a job's own code that training changes, such as a counter that its loss advances."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.guarding.users_state import python_modules
from saturn_airflow.training.model_attributes import is_plain, seen
from saturn_airflow.training.optim import own_classes, plain_values

#: By a Python module's name, values by the variable's, or by ``Class.attribute``.
Globals = dict[str, dict[str, Any]]


class JobGlobals:
    """The global variables of the Python modules that a job's model, loss and optimizer are in.

    :param model: as this rank trains it, before its first step.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._names = sorted(python_modules(job, model))
        self._model = model
        self._given: dict[tuple[str, str], str] = {}
        self._given = {where: _summary(value) for where, value in self._variables()}

    def values(self) -> tuple[Globals, dict[str, str]]:
        """What has changed, JSON-ready, and why what else has changed can't be kept, by its name."""
        found: Globals = {}
        why_not: dict[str, str] = {}
        for (module, name), value in self._variables():
            if self._given.get((module, name)) == _summary(value):
                continue
            try:
                found.setdefault(module, {})[name] = plain_values.encode(value, "it")
            except JobError as error:
                why_not[f"{module}.{name}"] = str(error)
        return {module: own for module, own in found.items() if own}, why_not

    def set(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with what :meth:`values` told."""
        for module, own in values.items():
            for name, value in own.items() if module in sys.modules else ():
                *classes, last = name.split(".")
                holder: Any = sys.modules[module]
                for part in classes:
                    holder = getattr(holder, part, None)
                if holder is not None:
                    setattr(holder, last, plain_values.restored(vars(holder).get(last), value))

    def _variables(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """What may be state of the job's."""
        for module in self._names:
            for name, value in list(vars(sys.modules[module]).items()):
                if isinstance(value, type):
                    if value.__module__ == module:
                        for key, part in list(vars(value).items()):
                            where = module, f"{name}.{key}"
                            if not key.startswith("_") and (where in self._given or _may_be_state(part)):
                                yield where, part
                # What was state once, and has become too large to be told from data, is state still.
                elif not name.startswith("__") and ((module, name) in self._given or _may_be_state(value)):
                    yield (module, name), value


def _may_be_state(value: Any) -> bool:
    if isinstance(value, nn.Module | Iterator):
        return True
    if isinstance(value, type | types.ModuleType | types.FunctionType | property):
        return False
    return is_plain(value, objects=True) or own_classes.fields_of(value) is not None


def _summary(value: Any) -> str:
    """What is another if ``value`` has changed."""
    try:
        encoded = plain_values.encode(value, "it")
    except JobError:
        encoded = repr(seen(value, {}))
    return hashlib.sha1(json.dumps(encoded, sort_keys=True).encode()).hexdigest()
