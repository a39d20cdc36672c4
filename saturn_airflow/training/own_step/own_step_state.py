"""The state of a model with a training step of its own: several optimizers, and schedulers that it steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.parallelism.module_state import has_extra_state
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import storing
from saturn_airflow.training.job_globals import JobGlobals
from saturn_airflow.training.model_attributes import Attributes, ModelAttributes
from saturn_airflow.training.optim import plain_values
from saturn_airflow.training.optim.group_state import GroupState, Values
from saturn_airflow.training.optim.own_state import OwnState, seen
from saturn_airflow.training.own_step import lightning
from saturn_airflow.training.own_step.user_step import OwnStep
from saturn_airflow.training.state import State, Tensors

_GRADIENT = "gradient"
# What every module has, and what techniques put into some.
_BARE = frozenset([*vars(nn.Module()), "forward", "whole_batch"])


class OwnStepState(State):
    """What a checkpoint has of such a job. Of the optimizers it tells them apart by their numbers.

    :param own: with its optimizers just made.
    :param kept: as :class:`State` has it, which says what the methods do.
    """

    def __init__(
        self, parallel: Parallel, own: OwnStep, aliases: Mapping[str, str], kept: JobGlobals | None
    ) -> None:
        self._states = [
            State(parallel, optimizer, aliases, GroupState(optimizer), OwnState(optimizer))
            for optimizer in own.optimizers
        ]
        first = self._states[0]
        super().__init__(parallel, own.optimizers[0], aliases, first.groups, first.own, kept)
        self._step = own
        self.groups = _Groups([state.groups for state in self._states])
        self.own = _Own([state.own for state in self._states])
        self.attributes = _Strict(parallel.model, parallel.ranks.device, own)
        self._given = [self._seen(one.scheduler.state_dict()) for one in own.schedulers]

    def optimizer_tensors(self) -> Tensors:
        tensors = {
            _with_number(name, number): tensor
            for number, state in enumerate(self._states)
            for name, tensor in state.optimizer_tensors().items()
        }
        # A step may leave gradients for the next, as when it accumulates them over batches.
        gradients = {f"optimizer.{name}.{_GRADIENT}": p.grad for name, p in self._parameters.items()}
        return tensors | {n: storing.stored(g) for n, g in gradients.items() if g is not None}

    def dtypes(self) -> dict[str, str]:
        return {
            _with_number(name, number) if name.startswith("optimizer.") else name: dtype
            for number, state in enumerate(self._states)
            for name, dtype in state.dtypes().items()
        }

    def optimizer_numbers(self) -> dict[str, dict[str, Any]]:
        numbers: dict[str, dict[str, Any]] = {}
        for number, state in enumerate(self._states):
            for name, entries in state.optimizer_numbers().items():
                own = {f"{number}/{key}": value for key, value in entries.items()}
                numbers.setdefault(name, {}).update(own)
        return numbers

    def common_numbers(self) -> dict[str, Any]:
        return _numbered([state.common_numbers() for state in self._states])

    def make_optimizer_tensors(self, shapes: Mapping[str, list[int]], dtypes: Mapping[str, str]) -> Tensors:
        tensors: Tensors = {}
        for number, state in enumerate(self._states):
            made = state.make_optimizer_tensors(_of(shapes, number), _of(dtypes, number))
            tensors.update({_with_number(name, number): tensor for name, tensor in made.items()})
        for name, parameter in self._parameters.items():
            if (full := f"optimizer.{name}.{_GRADIENT}") in shapes:
                tensors[full] = storing.stored(torch.zeros_like(parameter.detach()))
        return tensors

    def set_optimizer(
        self,
        tensors: Tensors,
        numbers: Mapping[str, Mapping[str, Any]],
        dtypes: Mapping[str, str],
        common: Mapping[str, Any],
    ) -> None:
        for number, state in enumerate(self._states):
            own = {name: _numbers_of(entries, number) for name, entries in numbers.items()}
            kept = {name: entries for name, entries in own.items() if entries}
            state.set_optimizer(_of(tensors, number), kept, _of(dtypes, number), _numbers_of(common, number))
        for name, parameter in self._parameters.items():
            if (gradient := tensors.get(f"optimizer.{name}.{_GRADIENT}")) is not None:
                parameter.grad = storing.original(gradient, parameter.dtype).reshape(parameter.shape)

    def schedulers(self) -> list[dict[str, Any]]:
        """What steps have changed in the schedulers, JSON-ready.

        :raises JobError: when that can't be kept.
        """
        changed = []
        for one, given in zip(self._step.schedulers, self._given, strict=True):
            what = f"what {type(one.scheduler).__name__} keeps as "
            # While it is held, its step is another.
            now = {key: value for key, value in one.scheduler.state_dict().items() if key != "step"}
            seen_now = self._seen(now)
            changed.append(
                {
                    key: plain_values.encode(value, f"{what}{key!r}")
                    for key, value in now.items()
                    if not _same(seen_now[key], given.get(key))
                }
            )
        return changed

    def _seen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What of a scheduler's values a step may change; some change inside."""
        known = [*self._step.optimizers, *(one.scheduler for one in self._step.schedulers)]
        memo: dict[int, Any] = dict.fromkeys(map(id, known))
        return {key: seen(value, memo) for key, value in values.items()}

    def set_schedulers(self, changed: Sequence[Mapping[str, Any]]) -> None:
        """Continue with what :meth:`schedulers` told."""
        for one, values in zip(self._step.schedulers, changed, strict=True):
            decoded = {key: plain_values.decode(value) for key, value in values.items()}
            with of_the_job(f"scheduler {type(one.scheduler).__name__}"):
                one.scheduler.load_state_dict({**one.scheduler.state_dict(), **decoded})


class _Groups(GroupState):
    """What several optimizers keep in their groups, one after the other."""

    def __init__(self, parts: Sequence[GroupState]) -> None:
        self._parts = parts
        self._lengths = [len(part.values()) for part in parts]

    def refuse_other_parameters(self) -> None:
        for part in self._parts:
            part.refuse_other_parameters()

    def values(self) -> Values:
        return [group for part in self._parts for group in part.values()]

    def set(self, state: Sequence[Mapping[str, Any]]) -> None:
        begin = 0
        for part, length in zip(self._parts, self._lengths, strict=True):
            part.set(state[begin : begin + length])
            begin += length


class _Own(OwnState):
    """What several optimizers keep as attributes."""

    def __init__(self, parts: Sequence[OwnState]) -> None:
        self._parts = parts

    def values(self) -> dict[str, Any]:
        return _numbered([part.values() for part in self._parts])

    def set(self, values: Mapping[str, Any]) -> None:
        for number, part in enumerate(self._parts):
            part.set(_numbers_of(values, number))


# What would be said by nobody, whatever a module says of its objects.
_PLAIN = (torch.Tensor, list, tuple, set, dict, deque)


class _Strict(ModelAttributes):
    """The attributes of a model that remembers things between its steps: none may be left out."""

    def __init__(self, model: nn.Module, device: torch.device, own: OwnStep) -> None:
        super().__init__(model, device)
        schedulers = [one.scheduler for one in own.schedulers]
        self._known = {id(one) for one in (*own.optimizers, *schedulers)}
        self._at_first = self._seen()

    def values(self) -> tuple[Attributes, dict[str, str]]:
        (kept, _), now = super().values(), self._seen()
        modules = dict(self._model.named_modules())
        for name, own in now.items():
            for key, value in own.items():
                if has_extra_state(modules[name]) and not isinstance(vars(modules[name])[key], _PLAIN):
                    continue  # an object, of which the module says what it keeps
                before = self._at_first.get(name, {})
                same = key in before and _same(before[key], value)
                if not same and key not in kept.get(name, {}):
                    where = f"{name}.{key}" if name else key
                    raise JobError(
                        f"the model's attribute {where!r} changes while it trains, and no checkpoint would "
                        "have it; register tensors with register_buffer, let get_extra_state say what "
                        "objects keep, and keep what belongs to one step in local variables"
                    )
        return kept, {}

    def _seen(self) -> dict[str, dict[str, Any]]:
        memo: dict[int, Any] = dict.fromkeys(self._known)
        modules = set(map(id, self._model.modules()))
        return {
            name: {
                key: [seen(value, memo), _hidden(value, modules)]
                for key, value in vars(module).items()
                if key not in _BARE and key not in lightning.ATTRIBUTES and id(value) not in self._known
            }
            for name, module in self._model.named_modules()
        }


def _hidden(value: Any, modules: set[int]) -> list[tuple[int, int]]:
    """How often tensors have changed of modules that are in a container, where torch does not find them."""
    if isinstance(value, nn.Module) and id(value) not in modules:
        tensors = (*value.parameters(), *value.buffers())
        return [(id(tensor), tensor._version) for tensor in tensors]
    items = value.values() if isinstance(value, Mapping) else value
    inside = items if isinstance(value, list | tuple | set | Mapping) else ()
    return [entry for item in inside for entry in _hidden(item, modules)]


def _with_number(name: str, number: int) -> str:
    parameter, _, key = name.rpartition(".")
    return f"{parameter}.{number}/{key}"


def _of(values: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What of the values is the optimizer's of that number, under the names that it has there."""
    found = {}
    for name, value in values.items():
        parameter, _, key = name.rpartition(".")
        if key.startswith(f"{number}/"):
            found[f"{parameter}.{key.partition('/')[2]}"] = value
    return found


def _numbered(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{number}/{key}": value for number, part in enumerate(parts) for key, value in part.items()}


def _numbers_of(values: Mapping[str, Any], number: int) -> dict[str, Any]:
    begin = f"{number}/"
    return {key.removeprefix(begin): value for key, value in values.items() if key.startswith(begin)}


def _same(one: Any, other: Any) -> bool:
    try:
        return plain_values.equal(one, other)
    except (RuntimeError, TypeError, ValueError):
        return False
