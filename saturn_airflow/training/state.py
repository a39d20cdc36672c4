"""Model and optimizer as named tensors and numbers, under the names of the job's own model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from saturn_airflow.model.errors import JobError
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import storing
from saturn_airflow.training.job_globals import JobGlobals
from saturn_airflow.training.model_attributes import Attributes, ModelAttributes, take_away
from saturn_airflow.training.optim import plain_values
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.own_state import OwnState

Tensors = dict[str, torch.Tensor]


class State:
    """Model and optimizer as a checkpoint sees them.

    :param aliases: for every name a parameter or buffer has in the whole model, the first of its names;
        tied weights have several.
    :param groups: what the optimizer keeps in its groups, and
    :param own: as attributes of its own.
    :param kept: the global variables of the job's code, where there is any.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        aliases: Mapping[str, str],
        groups: GroupState,
        own: OwnState,
        kept: JobGlobals | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.groups = groups
        self.own = own
        #: What the model's modules keep as attributes.
        self.attributes = ModelAttributes(parallel.model, parallel.ranks.device)
        self.globals = kept
        self._module = parallel.model
        self._aliases = aliases
        self._parameters = {aliases[name]: p for name, p in parallel.model.named_parameters()}

    def make_room(self, shapes: Mapping[str, torch.Size]) -> None:
        """Have buffers in the shapes that a checkpoint has them in: some get one with their first batch, as
        those of observers for quantization do.

        :param shapes: of stored tensors, by the names of :meth:`model_tensors`.
        """
        for name, tensor in self._model().items():
            shape = shapes.get(name)
            plain = not isinstance(tensor, torch.nn.Parameter | DTensor) and tensor.layout == torch.strided
            if plain and shape is not None and storing.stored(tensor.detach()).shape != shape:
                kept = storing.room(list(shape), tensor.dtype, tensor.device)
                tensor.data = storing.original(kept, tensor.dtype)

    def late_buffers(self) -> dict[str, list[int]]:
        """The shapes of buffers that a model that is loaded anew lacks, or has as None, by the names of
        :meth:`model_tensors`."""
        known = {f"model.{name}" for name in self._aliases.values()}
        return {name: list(tensor.shape) for name, tensor in self._model().items() if name not in known}

    def change_buffers(
        self, shapes: Mapping[str, list[int]], dtypes: Mapping[str, str], attributes: Attributes
    ) -> None:
        """Have the buffers that :meth:`late_buffers` told of, as far as this rank has their modules, and not
        those that are gone.

        :param dtypes: by name, as :meth:`dtypes` tells them.
        :param attributes: as :attr:`attributes` tells them: buffers may have taken the place of some.
        """
        take_away(self._module, attributes)
        modules, device = dict(self._module.named_modules()), self.attributes.device
        for name in shapes.keys() - self._model().keys():
            prefix, _, key = name.removeprefix("model.").rpartition(".")
            if prefix in modules:
                made = torch.zeros(shapes[name], dtype=getattr(torch, dtypes[name]), device=device)
                modules[prefix].register_buffer(key, made)

    def model_tensors(self) -> Tensors:
        """Parameters and persistent buffers in the form that checkpoints keep.

        After writing into them call :meth:`set_model`.
        """
        return {name: storing.stored(tensor.detach()) for name, tensor in self._model().items()}

    def set_model(self, tensors: Tensors) -> None:
        """Continue with these parameters and buffers, which :meth:`model_tensors` gave."""
        with torch.no_grad():
            for name, tensor in self._model().items():
                storing.restore(tensor, tensors[name])

    def untrained(self) -> set[str]:
        """The names of those of :meth:`model_tensors` that no gradient is computed for."""
        return {name for name, tensor in self._model().items() if not tensor.requires_grad}

    def optimizer_tensors(self) -> Tensors:
        """The optimizer's state of each parameter, as far as it is tensors with dimensions."""
        return {name: storing.stored(tensor) for name, tensor in self._kept_as_tensors().items()}

    def dtypes(self) -> dict[str, str]:
        """What the tensors' numbers are, by the names of the tensors."""
        tensors = {**self._model(), **self._kept_as_tensors()}
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}

    def optimizer_numbers(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of each parameter, as far as it is no tensors with dimensions; JSON-ready.

        :raises JobError: when something is kept that JSON can't hold.
        """
        numbers: dict[str, dict[str, Any]] = {}
        for name, key, value in self._optimizer_entries():
            if not _has_dimensions(value):
                what = f"what the optimizer keeps of {name!r} as {key!r}"
                numbers.setdefault(name, {})[key] = plain_values.encode(value, what)
        return numbers

    def common_numbers(self) -> dict[str, Any]:
        """What the optimizer keeps of no parameter in particular, JSON-ready.

        :raises JobError: when something is kept that JSON can't hold.
        """
        return {
            str(key): plain_values.encode(value, f"what the optimizer keeps as {key!r}")
            for key, value in self._optimizer.state.items()
            if not isinstance(key, torch.Tensor)
        }

    def make_optimizer_tensors(self, shapes: Mapping[str, list[int]], dtypes: Mapping[str, str]) -> Tensors:
        """Tensors to read the optimizer's state into, for those of ``shapes`` that belong to this rank.

        :param dtypes: what :meth:`dtypes` told; checkpoints of earlier versions don't say.
        :raises JobError: when state is not shaped like a parameter that is spread over devices.
        """
        tensors: Tensors = {}
        for full_name, shape in shapes.items():
            name = full_name.removeprefix("optimizer.").rpartition(".")[0]
            parameter = self._parameters.get(name)
            if parameter is not None:
                dtype = getattr(torch, dtypes[full_name]) if full_name in dtypes else parameter.dtype
                tensors[full_name] = _room_beside(parameter, full_name, shape, dtype)
        return tensors

    def set_optimizer(
        self,
        tensors: Tensors,
        numbers: Mapping[str, Mapping[str, Any]],
        dtypes: Mapping[str, str],
        common: Mapping[str, Any],
    ) -> None:
        """Continue with this state of the optimizer."""
        states: dict[str, dict[str, Any]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            if full_name in dtypes:
                tensor = storing.original(tensor, getattr(torch, dtypes[full_name]))
            states.setdefault(name, {})[key] = _laid_out_like(self._parameters[name], tensor)
        for name, entries in numbers.items():
            states.setdefault(name, {}).update(
                {key: plain_values.decode(value) for key, value in entries.items()}
            )
        name_of = {parameter: name for name, parameter in self._parameters.items()}
        state_dict = self._optimizer.state_dict()
        state_dict["state"] = {key: plain_values.decode(value) for key, value in common.items()}
        for group, indices in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], indices["params"], strict=True):
                if state := states.get(name_of[parameter]):
                    state_dict["state"][index] = state
        self._optimizer.load_state_dict(state_dict)
        self._keep_dtypes(states)

    def _keep_dtypes(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Undo that torch casts the state it loads to its parameter's dtype."""
        for name, key, value in self._optimizer_entries():
            saved = states.get(name, {}).get(key)
            if isinstance(saved, torch.Tensor) and value.dtype != saved.dtype:
                self._optimizer.state[self._parameters[name]][key] = saved.to(value.device)

    def _model(self) -> Tensors:
        # A model may put other tensors in the place of its buffers at any time, and register further ones.
        persistent = set(self._module.state_dict(keep_vars=True))
        buffers = {
            self._aliases.get(name, name): buffer
            for name, buffer in self._module.named_buffers()
            if name in persistent
        }
        tensors = {**self._parameters, **buffers}
        return {f"model.{name}": tensor for name, tensor in tensors.items()}

    def _kept_as_tensors(self) -> Tensors:
        entries = self._optimizer_entries()
        return {f"optimizer.{name}.{key}": value for name, key, value in entries if _has_dimensions(value)}

    def _optimizer_entries(self) -> Iterator[tuple[str, str, Any]]:
        for name, parameter in self._parameters.items():
            if parameter in self._optimizer.state:
                for key, value in self._optimizer.state[parameter].items():
                    yield name, key, value


def refuse_unsaved(optimizer: torch.optim.Optimizer) -> None:
    """Check that a checkpoint can hold what ``optimizer`` keeps here, besides tensors of its parameters.

    :raises JobError: naming what none can.
    """
    for of, kept in optimizer.state.items():
        of_parameter = isinstance(of, torch.Tensor)
        for key, value in (kept if of_parameter else {of: kept}).items():
            if not (of_parameter and _has_dimensions(value)):
                plain_values.encode(value, f"what the optimizer keeps as {key!r}")


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer of ``model``, the first of its names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _room_beside(
    parameter: torch.nn.Parameter, full_name: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """Memory to read state of ``parameter`` into."""
    if list(parameter.shape) == shape and not dtype.is_complex:
        return storing.stored(torch.zeros_like(parameter.detach(), dtype=dtype))
    if isinstance(parameter, DTensor) and shape != [1]:
        raise JobError(
            f"{full_name!r} in the checkpoint has the shape {shape}, unlike its parameter, which is "
            "spread over devices; go on under a technique that keeps parameters whole"
        )
    return storing.room(shape, dtype, parameter.device)


def _laid_out_like(parameter: torch.nn.Parameter, state: torch.Tensor) -> torch.Tensor:
    """``state`` with its numbers in the order in memory that the parameter has: fused kernels rely on it."""
    if isinstance(state, DTensor) or state.shape != parameter.shape or state.stride() == parameter.stride():
        return state
    return torch.empty_like(parameter.detach(), dtype=state.dtype).copy_(state)


def _has_dimensions(value: Any) -> bool:
    """Whether a checkpoint keeps ``value`` as a tensor; what has none is a number in it."""
    return isinstance(value, torch.Tensor) and value.ndim > 0
