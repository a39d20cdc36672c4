"""What ``mlflow.pyfunc.load_model`` calls to make a job's trained model of its folder again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from saturn_airflow.training.exports import load_exported


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
    """The model that was exported to the folder ``path``."""
    return Predictor(load_exported(path))


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
