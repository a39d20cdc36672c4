"""Values that optimizers keep, such as counters, as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from saturn_airflow.model.errors import JobError


def encode(value: Any, what: str) -> Any:
    """``value`` as JSON can hold it: numbers, strings, None, tensors, and tuples, lists and mappings of them.

    :param what: names the value where it can't be held.
    :raises JobError: when it is of another kind.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return encode(value.item(), what)
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_complex():
        return {"value": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [encode(part, what) for part in value]}
    if isinstance(value, list):
        return [encode(part, what) for part in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: encode(part, what) for key, part in value.items()}}
    raise JobError(
        f"{what} is a {type(value).__name__}, which no checkpoint can hold; keep numbers, strings or tensors"
    )


def decode(encoded: Any) -> Any:
    """The value that :func:`encode` made ``encoded`` of."""
    if isinstance(encoded, list):
        return [decode(part) for part in encoded]
    if not isinstance(encoded, Mapping):
        return encoded
    if "dtype" in encoded:
        return torch.tensor(encoded["value"], dtype=getattr(torch, encoded["dtype"]))
    if "tuple" in encoded:
        return tuple(decode(part) for part in encoded["tuple"])
    return {key: decode(part) for key, part in encoded["mapping"].items()}


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, tensors compared element by element."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = one.shape == other.shape and one.dtype == other.dtype
        return same_kind and bool(torch.equal(one.cpu(), other.cpu()))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return type(one) is type(other) and bool(one == other)
