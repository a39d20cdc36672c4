"""Model and optimizer as named tensors and numbers, under the names of the job's own model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from saturn_airflow.training.parallel import Parallel

Tensors = dict[str, torch.Tensor]


class State:
    """Model and optimizer as a checkpoint sees them.

    :param aliases: for every name a parameter or buffer has in the whole model, the first of its names;
        tied weights have several.
    """

    def __init__(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer, aliases: Mapping[str, str]
    ) -> None:
        self._optimizer = optimizer
        persistent = set(parallel.model.state_dict(keep_vars=True))
        self._parameters = {aliases[name]: p for name, p in parallel.model.named_parameters()}
        self._buffers = {
            aliases[name]: buffer for name, buffer in parallel.model.named_buffers() if name in persistent
        }

    def model_tensors(self) -> Tensors:
        """Parameters and persistent buffers; writing into the tensors changes the model."""
        tensors = {**self._parameters, **self._buffers}
        return {f"model.{name}": _at_least_1d(tensor.detach()) for name, tensor in tensors.items()}

    def optimizer_tensors(self) -> Tensors:
        """The optimizer's state of each parameter, as far as it is tensors with dimensions."""
        return {
            f"optimizer.{name}.{key}": value
            for name, key, value in self._optimizer_entries()
            if isinstance(value, torch.Tensor) and value.ndim
        }

    def optimizer_numbers(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of each parameter, as far as it is single numbers."""
        numbers: dict[str, dict[str, Any]] = {}
        for name, key, value in self._optimizer_entries():
            if not isinstance(value, torch.Tensor):
                numbers.setdefault(name, {})[key] = value
            elif not value.ndim:
                dtype = str(value.dtype).removeprefix("torch.")
                numbers.setdefault(name, {})[key] = {"value": value.item(), "dtype": dtype}
        return numbers

    def make_optimizer_tensors(self, shapes: Mapping[str, list[int]]) -> Tensors:
        """Tensors to read the optimizer's state into, for those of ``shapes`` that belong to this rank."""
        tensors: Tensors = {}
        for full_name, shape in shapes.items():
            name = full_name.removeprefix("optimizer.").rpartition(".")[0]
            parameter = self._parameters.get(name)
            if parameter is not None:
                like_parameter = list(parameter.shape) == shape
                tensors[full_name] = (
                    torch.zeros_like(parameter.detach())
                    if like_parameter
                    else torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                )
        return tensors

    def set_optimizer(self, tensors: Tensors, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with this state of the optimizer."""
        states: dict[str, dict[str, Any]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
            states.setdefault(name, {})[key] = tensor
        for name, entries in numbers.items():
            for key, value in entries.items():
                if isinstance(value, Mapping):
                    value = torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
                states.setdefault(name, {})[key] = value
        name_of = {parameter: name for name, parameter in self._parameters.items()}
        state_dict = self._optimizer.state_dict()
        for group, indices in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], indices["params"], strict=True):
                if state := states.get(name_of[parameter]):
                    state_dict["state"][index] = state
        self._optimizer.load_state_dict(state_dict)

    def _optimizer_entries(self) -> Iterator[tuple[str, str, Any]]:
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                yield name, key, value


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer of ``model``, the first of its names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim or isinstance(tensor, DTensor) else tensor.view(1)
