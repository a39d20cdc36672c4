"""Objects of classes of a job's own code: what they hold, and their classes, found again by their names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError

#: Whose objects are no state of a job: configurations, mostly.
LIBRARIES = ("torch", "transformers", "torchvision", "huggingface_hub", "numpy", "saturn_airflow")


def is_dataclass(value: Any) -> bool:
    """Whether ``value`` is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def holds_objects(value: Any, deep: int = 8) -> bool:
    """Whether ``value`` is, or a container in it holds, an object or a named tuple of the job's own.

    :param deep: in how many containers to look.
    """
    if fields_of(value) is not None or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    is_container = type(value) in (list, tuple, set, frozenset, deque)
    return is_container and deep > 0 and any(holds_objects(part, deep - 1) for part in value)


def fields_of(value: Any) -> dict[str, Any] | None:
    """What an object of a class of the job's own code holds; None of anything else."""
    kind: type = type(value)
    if not is_plain_class(kind):
        return None
    held = {name: getattr(value, name) for name in slots_of(value)}
    return {**held, **getattr(value, "__dict__", {})}


def is_plain_class(kind: type) -> bool:
    """Whether objects of a class are what their attributes are, as far as one can see."""
    return is_own(kind.__module__) and _has_plain_objects(kind)


@functools.cache
def _has_plain_objects(kind: type) -> bool:
    if getattr(kind, "__new__") is not object.__new__:  # noqa: B009 - mypy knows that of no class
        return False
    return not issubclass(kind, type | torch.nn.Module | Iterator | Enum)


def slots_of(value: Any) -> list[str]:
    """The names of what ``value`` holds in ``__slots__``."""
    kind: type = type(value)
    return [name for name in _slots(kind) if hasattr(value, name)]


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """The names of what objects of a class hold in ``__slots__``."""
    members = ((name, part) for base in kind.__mro__ for name, part in vars(base).items())
    return tuple(name for name, part in members if isinstance(part, types.MemberDescriptorType))


def is_own(module: str | None) -> bool:
    """Whether a Python module is the job's own code, also where that is installed as a package."""
    if module is None or is_library(module):
        return False
    return module.partition(".")[0] in references.packages or not is_installed(module)


def is_library(module: str) -> bool:
    """Whether a Python module is of what all jobs share, such as torch or Python's own library."""
    package = module.partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names


@functools.cache
def is_installed(module: str) -> bool:
    """Whether it is where pip puts packages, or Debian's pip, as in NVIDIA's containers."""
    parts = Path(file_of(module) or "").parts
    return "site-packages" in parts or "dist-packages" in parts


def file_of(module: str) -> str | None:
    """The file of an imported Python module; one that stands for another would import that when asked."""
    file = inspect.getattr_static(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) else None


def name_of(kind: type) -> str:
    """What :func:`found` finds a class by."""
    return f"{kind.__module__}:{kind.__qualname__}"


def class_of(reference: str, is_such: Callable[[type], bool]) -> Any:
    """A class that is imported already; nothing is imported for a checkpoint.

    :raises JobError: when it is not there, or is another kind of class by now.
    """
    kind = found(reference)
    if not isinstance(kind, type) or not is_such(kind):
        raise JobError(f"the checkpoint holds an object of {reference!r}, which is no such class any more")
    return kind


def found(reference: str) -> Any:
    """What is called so, of what is imported; None where there is nothing."""
    module, _, name = reference.partition(":")
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
