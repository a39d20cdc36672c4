"""What ``mlflow.pyfunc.load_model`` calls to make a job's trained model of its folder again.

A copy of this file goes with each model, as ``code/saturn_model.py``, so it imports nothing of this package.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_model as load_tensors
from torch import nn


class Predictor:
    """A model behind MLflow's ``predict``, on the CPU.

    :param model: the trained model, in evaluation mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """The model's outputs for a batch.

        :param data: what the model is called with: arrays under the names of its keyword arguments (a
            mapping, or a data frame whose columns they are), or one array.
        :param params: not used.
        :returns: an array; or the arrays among the outputs under their names, where the model returns such.
        """
        columns = data.to_dict("list") if hasattr(data, "to_dict") else data
        with torch.inference_mode():
            if isinstance(columns, Mapping):
                return _arrays(self.model(**{key: _tensor(value) for key, value in columns.items()}))
            return _arrays(self.model(_tensor(columns)))


def _load_pyfunc(path: str) -> Predictor:
    """The model that was exported to the folder ``path``, by the code that is on the module path."""
    job = json.loads(Path(path, "job.json").read_text())
    module, _, name = job["load_model"].partition(":")
    _check_allowed(module)
    arguments = job.get("model_args", {})
    if '"from_connection":' in json.dumps(arguments):
        raise ValueError(
            "job.json has a secret among its model_args, and not its value; load the model with "
            "saturn_airflow.training.exports.load_exported(folder, model_args={...})"
        )
    function = getattr(importlib.import_module(module), name)
    if inspect.isroutine(function) or inspect.isclass(function):  # it may be imported there
        _check_allowed(str(function.__module__ or module))
    made: Any = function(**arguments)
    model: nn.Module = made.model if job.get("trainer") else made
    load_weights(model, Path(path, "model.safetensors"))
    return Predictor(model.eval())


def load_weights(model: nn.Module, file: Path) -> None:
    """Give ``model`` the weights in ``file``, sparse buffers and those whose elements share memory, too."""
    _change_buffers(model, file)
    found = [(module, *own) for module in model.modules() for own in module.named_buffers(recurse=False)]
    sparse = [entry for entry in found if entry[2].layout != torch.strided]
    for module, name, buffer in found:
        if buffer.layout != torch.strided or 0 in buffer.stride():
            module._buffers[name] = buffer.to_dense().clone(memory_format=torch.contiguous_format)
    load_tensors(model, str(file))
    for module, name, buffer in sparse:
        module._buffers[name] = getattr(module, name).to_sparse(layout=buffer.layout)


def _change_buffers(model: nn.Module, file: Path) -> None:
    """Take away the buffers that training has taken away, and register those that it has made."""
    modules = dict(model.named_modules())
    with safe_open(str(file), "pt") as saved:
        told = saved.metadata() or {}
        for name, as_none in json.loads(told.get("gone", "{}")).items():
            prefix, _, key = name.rpartition(".")
            if as_none:
                modules[prefix]._buffers[key] = None
            else:
                modules[prefix]._buffers.pop(key, None)
        for name in json.loads(told.get("made", "[]")):
            prefix, _, key = name.rpartition(".")
            modules[prefix].__dict__.pop(key, None)
            modules[prefix].register_buffer(key, saved.get_tensor(name))


def _check_allowed(module: str) -> None:
    """Refuse what ``saturn_airflow.model.allowed_modules`` refuses."""
    allowed = [name.strip() for name in os.environ.get("SATURN_ALLOWED_MODULES", "").split(",")]
    if any(name and f"{module}.".startswith(f"{name}.") for name in allowed):
        return
    if any(allowed) or module.split(".")[0] in {*sys.stdlib_module_names, "saturn_airflow"}:
        raise ValueError(f"job.json names module {module!r}, which is not among SATURN_ALLOWED_MODULES")


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))


def _arrays(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs.float().numpy() if outputs.dtype == torch.bfloat16 else outputs.numpy()
    if isinstance(outputs, Mapping):
        return {key: _arrays(value) for key, value in outputs.items() if isinstance(value, torch.Tensor)}
    if isinstance(outputs, Sequence):
        return [_arrays(value) for value in outputs if isinstance(value, torch.Tensor)]
    raise TypeError(
        f"the model returned a {type(outputs).__name__}; tensors are expected, or a mapping of them"
    )
