"""Whether a job's steps depend on something that no checkpoint can hold: a resumed job would lose it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.functions import ValuePlace
from saturn_airflow.training.guarding import resumed_model
from saturn_airflow.training.guarding.remembered import KnownSamples
from saturn_airflow.training.job_globals import JobGlobals
from saturn_airflow.training.model_attributes import ModelAttributes, name_of
from saturn_airflow.training.optim import own_classes


class Watched:
    """What a plain loop's ``model`` and the job's global variables are before its first step."""

    def __init__(self, job: Job, model: nn.Module, device: torch.device) -> None:
        self._job = job
        self._model = model
        self._attributes = ModelAttributes(model, device)
        self._globals = JobGlobals(job, model)
        #: What training remembers of samples.
        self.remembered = KnownSamples(model, self._attributes, self._globals)
        self._variables: dict[str, str] = {}

    def forgotten(self) -> dict[str, str]:
        """Why what has changed by now can't be kept, by its name."""
        _, attributes = self._attributes.values()
        _, self._variables = self._globals.values()
        return {**attributes, **self._variables}

    def refuse_what_is_missed(self, forgotten: dict[str, str], step: Callable[[], object]) -> None:
        """Take one more step without what :meth:`forgotten` told.

        What a step makes anew, such as a note of its last outputs, it does not miss.

        :raises JobError: when the step looks at any of it.
        """
        with self._gone(forgotten):
            step()

    def refuse_what_is_lost(
        self, another: nn.Module, loss: resumed_model.Loss, batch: Any, allowed: float
    ) -> None:
        """Compare the loss of a batch with that of a model that goes on from a checkpoint.

        :raises JobError: as :func:`resumed_model.refuse_what_is_lost`.
        """
        kept, _ = self._attributes.values()
        functions = self._globals.values()[0].get("", {})
        resumed_model.refuse_what_is_lost(
            self._job, self._model, another, kept, functions, loss, batch, allowed
        )

    @contextmanager
    def _gone(self, why_not: dict[str, str]) -> Iterator[None]:
        undo: list[ValuePlace] = []
        modules = dict(self._model.named_modules())
        held = {name_of(p, k): (m, k) for p, m in modules.items() for k in list(vars(m))}
        for name, why in why_not.items():
            place = self._globals.place(name) if name in self._variables else None
            if name in held:
                module, key = held[name]
                place = ValuePlace(vars(module).get(key), functools.partial(setattr, module, key))
            # Anything else may be a cache, which steps read and can do without.
            if place is not None and (
                isinstance(place.value, Iterator | nn.Module) or own_classes.holds_objects(place.value)
            ):
                undo.append(place)
                place.put(_Gone(name, why))
        try:
            yield
        finally:
            for place in undo:
                place.put(place.value)


class _Gone:
    """Stands in the place of a value, and raises as soon as somebody looks at it."""

    def __init__(self, name: str, why: str) -> None:
        object.__setattr__(self, "_told", (name, why))

    def _raise(self, *unused: Any, **unused_too: Any) -> NoReturn:
        name, why = object.__getattribute__(self, "_told")
        raise JobError(
            f"training depends on {name!r}, which it changes, and which a job that is resumed would lose: "
            f"{why}. Keep it in a buffer (register_buffer) or in numbers, tensors, arrays, containers or "
            "dataclasses of them; or let its module's get_extra_state() return such, and set_extra_state() "
            "take it. If it may be lost, Job(trust=[...]) with the technique's name leaves it unchecked"
        )

    __getattr__ = __setattr__ = __call__ = __iter__ = __next__ = __len__ = __bool__ = __getitem__ = _raise
    __setitem__ = __contains__ = __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = (
        _raise
    )
    __matmul__ = __rmatmul__ = __truediv__ = __rtruediv__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = (
        _raise
    )
    __float__ = __int__ = __index__ = __enter__ = __str__ = __neg__ = __abs__ = __pow__ = __rpow__ = _raise
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for value in args:
            if isinstance(value, cls):
                value._raise()
        raise JobError(f"{function} was given something that would be lost when the job is resumed")
