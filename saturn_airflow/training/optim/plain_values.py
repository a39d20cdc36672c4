"""Values that optimizers, modules and a job's code keep, such as counters, as JSON and back.

Nothing that is read runs code: containers, tensors, arrays and generators are built from numbers, and objects
get their attributes, without ``__init__``, only where the job's own code has defined their class by then.
"""

from __future__ import annotations

import base64
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from saturn_airflow.launch import handed_over
from saturn_airflow.model.errors import JobError
from saturn_airflow.training.optim.own_classes import class_of, fields_of, found, is_plain_class, name_of
from saturn_airflow.training.optim.random_generators import (
    generator_state,
    is_generator,
    set_generator_state,
)

#: What every module has of its own.
OF_MODULES = frozenset([*vars(torch.nn.Module()), "forward", "_compiled_call_impl"])
# Numbers of a tensor that are written as such; more are written as their bytes.
_AS_NUMBERS = 4096
#: Bytes that a value may have in a checkpoint beside the parameters, and how deep it may be nested.
LARGEST, DEEPEST = 2**24, 64
_MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": defaultdict,
}
_SCALARS = (bool, int, float, str, bytes, bytearray, complex, itertools.count)
_FACTORIES = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str}


def encode(value: Any, what: str, *, there: bool = True) -> Any:
    """``value`` as JSON can hold it: numbers, strings, None, tensors, arrays, random generators, members
    of enumerations, Python's containers, and dataclasses of them.

    :param what: names the value where it can't be held.
    :param there: whether it is read into one that is there already (:func:`restored`); else it is made anew.
    :raises JobError: when it is of another kind, holds itself, or is too large.
    """
    return _Encoder(what, there).encode(value)


def try_encode(value: Any) -> Any:
    """What :func:`encode` makes of ``value``, or the type of what can't be held."""
    try:
        return encode(value, "it")
    except JobError:
        return {"unknown": type(value).__name__}


def is_scalar(value: Any) -> bool:
    """Whether ``value`` can be held, and holds no other values."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    plain = value is None or type(value) in _SCALARS
    return plain or isinstance(value, np.generic | Enum) or is_generator(value)


def is_mapping(value: Mapping[Any, Any]) -> bool:
    """Whether ``value`` is a mapping that can be held if its items can."""
    factory = getattr(value, "default_factory", None)
    return type(value) in _MAPPINGS.values() and (factory is None or factory in _FACTORIES.values())


class _Encoder:
    def __init__(self, what: str, there: bool) -> None:
        self._what = what
        self._inside: list[int] = []
        #: How many there are around what is encoded; it is made anew, where there are any.
        self._containers = 0 if there else 1
        self._bytes = 0

    def encode(self, value: Any) -> Any:
        if type(value) is str:
            return value if (parts := handed_over.taken_out(value)) is None else {"secret": parts}
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, Enum):
            return self._member(value)
        if id(value) in self._inside:
            raise JobError(f"{self._what} holds itself, which no checkpoint can hold")
        if len(self._inside) > DEEPEST:
            raise JobError(f"{self._what} has more than {DEEPEST} containers and objects within each other")
        self._inside.append(id(value))
        try:
            return self._encoded(value)
        finally:
            self._inside.pop()

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"array": self._text(value), "numbers": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, np.generic):
            return self.encode(value.item())
        if isinstance(value, bytes | bytearray):
            if handed_over.taken_out(value.decode(errors="replace")) is not None:
                self._refuse_secret()
            return {"bytes": self._text(value), "mutable": isinstance(value, bytearray)}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if (generator := generator_state(value)) is not None:
            kind = getattr(value, "device", torch.device("cpu")).type
            place = {} if kind == "cpu" else {"device": kind}
            return {"generator": type(value).__name__, "state": self.encode(generator), **place}
        if type(value) is itertools.count:
            return {"count": [self.encode(part) for part in value.__reduce__()[1]]}
        if isinstance(value, torch.nn.Module):
            return self._module(value)
        if (fields := fields_of(value)) is not None:
            return {"object": self._name(type(value)), "fields": self._fields(fields)}
        self._containers += 1
        try:
            return self._container(value)
        finally:
            self._containers -= 1

    def _name(self, kind: type) -> str:
        """The name of a class, by which it is found again: what containers hold is made anew."""
        name = name_of(kind)
        if self._containers and found(name) is not kind:
            raise JobError(
                f"{self._what} holds a {kind.__name__} to be made anew, which no checkpoint can do: "
                f"{name!r} can't be imported; define the class at the top level of its module"
            )
        return name

    def _module(self, value: torch.nn.Module) -> Any:
        """Buffers and attributes of a module beside the model, such as a loss."""
        parts = {}
        for prefix, module in value.named_modules():
            own = {k: part for k, part in vars(module).items() if k not in OF_MODULES and not callable(part)}
            parts[prefix] = self._fields({**own, **module._buffers})
        return {"module": name_of(type(value)), "parts": parts}

    def _tensor(self, value: torch.Tensor) -> Any:
        known = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not known or value.layout != torch.strided or value.is_quantized:
            self._refuse(value)
        self._count(value.numel() * value.element_size())
        value, dtype = value.detach(), str(value.dtype).removeprefix("torch.")
        # Unless it says so, a tensor was in the host's memory.
        place = {} if value.device.type == "cpu" else {"device": value.device.type}
        if not value.numel():  # of which numbers do not tell the shape
            return {"value": [], "dtype": dtype, "shape": list(value.shape), **place}
        if value.numel() <= _AS_NUMBERS and not value.is_complex():
            return {"value": value.tolist(), "dtype": dtype, **place}
        numbers = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"tensor": self._text(numbers), "numbers": dtype, "shape": list(value.shape), **place}

    def _member(self, value: Enum) -> Any:
        """A member of an enumeration, if it can be found again by its name."""
        kind = type(value)
        if found(name_of(kind)) is not kind or value.name not in kind.__members__:
            self._refuse(value)
        return {"enum": name_of(kind), "member": value.name}

    def _container(self, value: Any) -> Any:
        if type(value) is deque:
            self._count(8 * len(value))
            return {"deque": [self.encode(part) for part in value], "maxlen": value.maxlen}
        if type(value) in (set, frozenset):
            parts = sorted((self.encode(part) for part in value), key=repr)
            return {"set": parts, "frozen": type(value) is frozenset}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": self._name(type(value)), "parts": [self.encode(part) for part in value]}
        if type(value) in (tuple, torch.Size):
            return {"tuple": [self.encode(part) for part in value]}
        if type(value) is list:
            self._count(8 * len(value))
            return [self.encode(part) for part in value]
        if type(value) in _MAPPINGS.values():
            return self._mapping(value)
        return self._refuse(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        self._count(8 * len(value))
        if type(value) is dict and all(type(key) is str for key in value):
            return {"mapping": self._fields(value)}
        factory = getattr(value, "default_factory", None)
        if factory is not None and factory not in _FACTORIES.values():
            self._refuse(value)
        pairs = [[self.encode(key), self.encode(part)] for key, part in value.items()]
        name = None if factory is None else factory.__name__
        return {"pairs": pairs, "kind": type(value).__name__, "factory": name}

    def _fields(self, value: Mapping[str, Any]) -> dict[str, Any]:
        if any(handed_over.taken_out(key) is not None for key in value):
            self._refuse_secret()
        return {key: self.encode(part) for key, part in value.items()}

    def _refuse_secret(self) -> None:
        raise JobError(f"{self._what} holds a secret as bytes or as a key, which no checkpoint may hold")

    def _text(self, data: Any) -> str:
        self._count(data.nbytes if isinstance(data, np.ndarray) else len(data))
        return base64.b64encode(data.tobytes() if isinstance(data, np.ndarray) else bytes(data)).decode()

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > LARGEST:
            raise JobError(f"{self._what} has more than {LARGEST >> 20} MiB")

    def _refuse(self, value: Any) -> Any:
        raise JobError(
            f"{self._what} is of type {type(value).__name__}, which no checkpoint can hold; keep numbers, "
            "strings, tensors, arrays, or containers and dataclasses of them"
        )


def decode(encoded: Any) -> Any:
    """The value that :func:`encode` made ``encoded`` of.

    :raises JobError: when it is an object of a dataclass that is not there any more.
    """
    if isinstance(encoded, list):
        return [decode(part) for part in encoded]
    if not isinstance(encoded, Mapping):
        return encoded
    for kind, make in _KINDS.items():
        if kind in encoded:
            return make(encoded)
    return {key: decode(part) for key, part in encoded["mapping"].items()}


def restored(current: Any, encoded: Any) -> Any:
    """The value that ``encoded`` tells, in the place of ``current``: containers and objects that are there
    stay, since others may refer to them, and get the contents of then."""
    if isinstance(encoded, list) and type(current) is list:
        current[:] = _parts_restored(current, encoded)
        return current
    if not isinstance(encoded, Mapping):
        return decode(encoded)
    if "module" in encoded:
        return _restored_module(current, encoded)
    if "object" in encoded and name_of(type(current)) == encoded["object"]:
        fields = encoded["fields"]
        there = fields_of(current) or {}
        for name in there.keys() - fields.keys():
            object.__delattr__(current, name)
        for name, part in fields.items():
            object.__setattr__(current, name, restored(there.get(name), part))
        return current
    if "generator" in encoded and type(current).__name__ == encoded["generator"]:
        set_generator_state(current, decode(encoded["state"]))
        return current
    if "mapping" in encoded and type(current) is dict:
        there = dict(current)
        current.clear()
        current.update({k: restored(there.get(k), part) for k, part in encoded["mapping"].items()})
        return current
    if "tuple" in encoded and type(current) is tuple:
        return tuple(_parts_restored(current, encoded["tuple"]))
    value = decode(encoded)
    if type(current) is not type(value):
        return value
    if isinstance(value, deque | list):
        current.clear()
        current.extend(value)
    elif isinstance(value, dict | set):
        current.clear()
        current.update(value)
    elif isinstance(value, torch.Tensor) and _fits(current, value):
        with torch.no_grad():
            current.copy_(value)
    elif isinstance(value, np.ndarray) and value.shape == current.shape and value.dtype == current.dtype:
        current[...] = value
    else:
        return value
    return current


def _fits(current: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``current`` can have the numbers of ``value``, and be the same tensor still."""
    plain = current.layout == torch.strided and not current.requires_grad and 0 not in current.stride()
    return plain and current.shape == value.shape and current.dtype == value.dtype


def _parts_restored(current: Sequence[Any], encoded: Sequence[Any]) -> list[Any]:
    """The parts of a container; the objects among those that are there stay."""
    return [
        restored(current[index] if index < len(current) else None, part) for index, part in enumerate(encoded)
    ]


def _restored_module(current: Any, encoded: Mapping[str, Any]) -> Any:
    if not isinstance(current, torch.nn.Module) or name_of(type(current)) != encoded["module"]:
        raise JobError(f"the checkpoint holds a {encoded['module']!r}, which is another object by now")
    modules = dict(current.named_modules())
    for prefix, parts in encoded["parts"].items():
        for name, part in parts.items() if prefix in modules else ():
            module = modules[prefix]
            buffer = module._buffers.get(name)
            if name in module._buffers:
                value = decode(part)
                module._buffers[name] = value.to(buffer.device) if buffer is not None else value
            else:
                module.__dict__[name] = restored(vars(module).get(name), part)
    return current


def _decoded_tensor(encoded: Mapping[str, Any]) -> torch.Tensor:
    numbers = torch.frombuffer(bytearray(base64.b64decode(encoded["tensor"])), dtype=torch.uint8)
    return _placed(numbers.view(getattr(torch, encoded["numbers"])).reshape(encoded["shape"]), encoded)


def _decoded_numbers(encoded: Mapping[str, Any]) -> torch.Tensor:
    tensor = torch.tensor(encoded["value"], dtype=getattr(torch, encoded["dtype"]))
    return _placed(tensor.reshape(encoded["shape"]) if "shape" in encoded else tensor, encoded)


def _placed(tensor: torch.Tensor, encoded: Mapping[str, Any]) -> torch.Tensor:
    """``tensor`` on a device of the kind that it was on, where there is one."""
    kind = encoded.get("device", "cpu")
    return tensor if kind == "cuda" and not torch.cuda.is_available() else tensor.to(kind)


def _decoded_array(encoded: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    numbers = np.frombuffer(base64.b64decode(encoded["array"]), dtype=encoded["numbers"])
    return numbers.reshape(encoded["shape"]).copy()


def _decoded_bytes(encoded: Mapping[str, Any]) -> bytes | bytearray:
    data = base64.b64decode(encoded["bytes"])
    return bytearray(data) if encoded["mutable"] else data


def _decoded_pairs(encoded: Mapping[str, Any]) -> Any:
    pairs = [(decode(key), decode(part)) for key, part in encoded["pairs"]]
    if encoded["kind"] == "defaultdict":
        return defaultdict(_FACTORIES.get(encoded["factory"]), pairs)
    return _MAPPINGS[encoded["kind"]](dict(pairs))


def _decoded_member(encoded: Mapping[str, Any]) -> Any:
    name = encoded["member"]
    return class_of(encoded["enum"], lambda cls: issubclass(cls, Enum) and name in cls.__members__)[name]


def _decoded_named(encoded: Mapping[str, Any]) -> Any:
    found = class_of(encoded["named"], lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"))
    return tuple.__new__(found, map(decode, encoded["parts"]))


def _decoded_object(encoded: Mapping[str, Any]) -> Any:
    value = object.__new__(class_of(encoded["object"], is_plain_class))
    for key, part in encoded["fields"].items():
        object.__setattr__(value, key, decode(part))
    return value


def _decoded_generator(encoded: Mapping[str, Any]) -> Any:
    name, state = encoded["generator"], decode(encoded["state"])
    if name == "Random":
        made: Any = random.Random()
    elif name == "RandomState":
        made = np.random.RandomState()
    elif name == "Generator" and isinstance(state, torch.Tensor):
        made = torch.Generator(encoded.get("device", "cpu"))  # the states of others are of another length
    else:
        made = np.random.Generator(getattr(np.random, state["bit_generator"])())
    set_generator_state(made, state)
    return made


_KINDS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "dtype": _decoded_numbers,
    "tuple": lambda e: tuple(decode(part) for part in e["tuple"]),
    "tensor": _decoded_tensor,
    "array": _decoded_array,
    "bytes": _decoded_bytes,
    "complex": lambda e: complex(*e["complex"]),
    "generator": _decoded_generator,
    "count": lambda e: itertools.count(*map(decode, e["count"])),
    "object": _decoded_object,
    "named": _decoded_named,
    "enum": _decoded_member,
    "secret": lambda e: handed_over.put_back(e["secret"]),
    "deque": lambda e: deque(map(decode, e["deque"]), e["maxlen"]),
    "set": lambda e: (frozenset if e["frozen"] else set)(map(decode, e["set"])),
    "pairs": _decoded_pairs,
}


def is_of_the_first_format(encoded: Any) -> bool:
    """Whether versions that wrote checkpoints of format 1 could read it: scalars, tensors as numbers, tuples,
    lists and mappings."""
    if isinstance(encoded, list):
        return all(map(is_of_the_first_format, encoded))
    if not isinstance(encoded, Mapping):
        return True
    if "mapping" in encoded:
        return all(map(is_of_the_first_format, encoded["mapping"].values()))
    return "dtype" in encoded or ("tuple" in encoded and is_of_the_first_format(encoded["tuple"]))


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, tensors compared element by element; NaN is the same as NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return equal_tensors(one.cpu(), other.cpu())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        numbers = one.dtype.kind in "fc"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=numbers)
    if isinstance(one, tuple | list | deque) and isinstance(other, tuple | list | deque):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor | np.ndarray) or isinstance(other, torch.Tensor | np.ndarray):
        return False
    if type(one) is not type(other):
        return False
    if (generator := generator_state(one)) is not None:
        return equal(generator, generator_state(other))
    if type(one) is itertools.count:
        return repr(one) == repr(other)
    if (fields := fields_of(one)) is not None:
        return equal(fields, fields_of(other))
    if isinstance(one, float | complex) and one != one:
        return bool(other != other)
    return bool(one == other)


def equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on one device have the same shape, format and numbers; NaN is the same as NaN."""
    same_kind = one.shape == other.shape and one.dtype == other.dtype and one.layout == other.layout
    one, other = (part if part.layout == torch.strided else part.to_dense() for part in (one, other))
    if not same_kind or torch.equal(one, other):
        return same_kind
    may_be_nan = one.is_floating_point() or one.is_complex()
    return may_be_nan and bool(((one == other) | (one.isnan() & other.isnan())).all())
