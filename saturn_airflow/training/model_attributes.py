"""What a model's modules remember as plain attributes, such as a counter of their own, besides buffers."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from saturn_airflow.model.errors import JobError
from saturn_airflow.parallelism.module_state import copied, has_extra_state
from saturn_airflow.training import of_all_ranks
from saturn_airflow.training.nested import tensors_in
from saturn_airflow.training.optim import own_classes, plain_values
from saturn_airflow.training.switched import SWITCHED, Switches, switch

#: By a module's name, values by the attribute's.
Attributes = dict[str, dict[str, Any]]

_MOST = 2**14  # items of a container
_LOOKED_AT = 64  # items of a container that no checkpoint can hold
_DEEP = 4  # attributes of attributes of ... that are looked at where nothing can be kept
# That transformers has hooked this model, which it does when outputs of layers are first asked for: one that
# is loaded anew is not hooked yet.
_OF_THIS_PROCESS = frozenset({"_output_capturing_hooks_installed"})
#: Where a summary is instead of what can't be encoded.
_UNKNOWN = "unknown"
#: What :meth:`ModelAttributes.values` calls what a module says of itself,
EXTRA = "get_extra_state()"
#: buffers that are not persistent, which are no tensors of a checkpoint,
PASSING = "buffers that are not persistent"
#: and what a module has no more.
GONE = "what is gone"
_NO_ATTRIBUTES = frozenset({EXTRA, PASSING, GONE, SWITCHED})


def plain_attributes(model: nn.Module) -> Attributes:
    """The attributes of modules that a checkpoint can hold, or a copy of a moment."""
    found: Attributes = {}
    memo: dict[int, Any] = {}  # what several modules hold, they hold together
    for prefix, module in model.named_modules():
        own = {key: value for key, value in _own(module) if is_plain(value)}
        found[prefix] = copied(own, memo)
    return found


def changed(before: Attributes, now: Attributes) -> Attributes:
    """What of ``now`` is not as it was."""
    return {
        prefix: {
            key: value
            for key, value in attributes.items()
            if key not in before.get(prefix, {}) or not plain_values.equal(before[prefix][key], value)
        }
        for prefix, attributes in now.items()
    }


class ModelAttributes:
    """The attributes that training changes, for checkpoints.

    :param model: as this rank trains it, before its first step.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self.device = device
        self.given = plain_attributes(model)
        self._others = other_attributes(model)
        self._classes = _classes(model)
        self._kinds = {prefix: {k: type(v) for k, v in _own(m)} for prefix, m in model.named_modules()}
        self._objects = self._encoded_objects()
        modules = dict(_in_python(model))
        self._buffers = {prefix: set(_buffers(module)) for prefix, module in modules.items()}
        self._passing = {prefix: _passing_buffers(module) for prefix, module in modules.items()}
        #: Which modules train, and which parameters ask for gradients.
        self.switches = Switches(model)
        self._before: Attributes = {prefix: {EXTRA: extra} for prefix, extra in self._extra_states().items()}

    def values(self) -> tuple[Attributes, dict[str, str]]:
        """What has changed, JSON-ready, and why what else has changed can't be kept, by its name."""
        found: Attributes = {}
        why_not: dict[str, str] = {}
        modules = dict(self._model.named_modules())
        extra = self._extra_states()
        now = {**changed(self.given, plain_attributes(self._model))}
        for prefix, objects in self.objects().items():
            own = {key: vars(modules[prefix])[key] for key in objects if key != EXTRA}
            now.setdefault(prefix, {}).update(own)
        now |= {prefix: {EXTRA: modules[prefix].get_extra_state()} for prefix in extra}
        for prefix, own in now.items():
            for key, value in own.items():
                there = self._kinds.get(prefix, {}).get(key) is type(value)
                try:
                    encoded = plain_values.encode(value, "it", there=there)
                    found.setdefault(prefix, {})[key] = self._placed(value, encoded)
                except JobError as error:
                    why_not[name_of(prefix, key)] = str(error)
        for prefix, others in other_attributes(self._model).items():
            for key, summary in others.items() if prefix not in extra else ():
                if self._others.get(prefix, {}).get(key) != summary:
                    kind = type(vars(modules[prefix])[key]).__name__
                    why_not[name_of(prefix, key)] = f"it is a {kind}, which no checkpoint can hold"
        why_not.update(self._other_modules())
        self._add_passing_buffers(found, why_not)
        for prefix, own in self.gone().items():
            found.setdefault(prefix, {}).update(own)
        for prefix, switched in self.switches.values().items():
            found.setdefault(prefix, {})[SWITCHED] = plain_values.encode(switched, "it")
        return {prefix: own for prefix, own in found.items() if own}, why_not

    def _placed(self, value: Any, encoded: Any) -> Any:
        """``encoded``, of which a tensor says that it is to stay in the host's memory, where the model's
        are not; on a CPU it may be there only since they are."""
        apart = isinstance(value, torch.Tensor) and value.device.type == "cpu" != self.device.type
        return {**encoded, "device": "cpu"} if apart else encoded

    def _add_passing_buffers(self, found: Attributes, why_not: dict[str, str]) -> None:
        """Those that training has written into, or has put into the place of others."""
        for prefix, module in _in_python(self._model):
            given, told = self._passing.get(prefix, {}), dict[str, Any]()
            for key, (now, _) in _passing_buffers(module).items():
                then, version = given.get(key, (None, 0))
                if then is not None and _is_as_it_was(now, then, version):
                    continue
                try:
                    # Others may refer to one that was written into, and to what one took the place of.
                    encoded = self._placed(now, plain_values.encode(now, "it"))
                    told[key] = {**encoded, "written": now is then}
                except JobError as error:
                    why_not[name_of(prefix, key)] = str(error)
            if told:
                found.setdefault(prefix, {})[PASSING] = {"buffers": told}

    def gone(self) -> Attributes:
        """The attributes that modules had and have no more, and the buffers: whether they are None."""
        found: Attributes = {}
        for prefix, module in _in_python(self._model):
            there = {*module._parameters, *module._modules}
            attributes = sorted(self._kinds.get(prefix, {}).keys() - vars(module).keys() - there)
            lost = self._buffers.get(prefix, set()) - _buffers(module).keys() - there
            buffers = {key: key in module._buffers for key in sorted(lost)}
            if attributes or buffers:
                found[prefix] = {GONE: {"attributes": attributes, "buffers": buffers}}
        return found

    def set(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with what :meth:`values` told, as far as the modules are on this rank."""
        put(self._model, values, self.device)
        self.switches.set(switched(values))
        self._before |= self.values()[0]

    def noted(self, values: Attributes) -> Attributes:
        """What :meth:`values` told, for :func:`of_all_ranks.merged`."""
        return of_all_ranks.noted(values, self._before)

    def objects(self) -> Attributes:
        """The objects of the job's own classes, and containers of them, that have changed, and what modules
        say, JSON-ready."""
        found: Attributes = {prefix: {EXTRA: extra} for prefix, extra in self._extra_states().items()}
        for prefix, objects in self._encoded_objects().items():
            given = self._objects.get(prefix, {})
            changed_ones = {key: encoded for key, encoded in objects.items() if given.get(key) != encoded}
            found.setdefault(prefix, {}).update(changed_ones)
        return found

    def _other_modules(self) -> dict[str, str]:
        """Of modules that have come or gone, or taken the place of others, why they can't be kept."""
        before, now = self._classes, _classes(self._model)
        return {
            prefix
            or "the model": f"it was {before.get(prefix, 'not there')}, and is {now.get(prefix, 'gone')} "
            "by now; a model that is loaded has its modules as load_model makes them"
            for prefix in {**before, **now}
            if before.get(prefix) != now.get(prefix)
        }

    def _extra_states(self) -> dict[str, Any]:
        """What modules say of themselves, JSON-ready."""
        return {
            prefix: plain_values.encode(module.get_extra_state(), "it")
            for prefix, module in self._model.named_modules()
            if has_extra_state(module)
        }

    def _encoded_objects(self) -> Attributes:
        """Objects of the job's own classes, which may change inside, and containers of them."""
        found: Attributes = {}
        for prefix, module in self._model.named_modules():
            for key, value in _own(module):
                own = own_classes.fields_of(value) is not None or not is_plain(value)
                if own and is_plain(value, objects=True):
                    found.setdefault(prefix, {})[key] = _encoded(value)
        return found


def _classes(model: nn.Module) -> dict[str, str]:
    return {prefix: f"a {type(module).__name__}" for prefix, module in model.named_modules()}


def _encoded(value: Any) -> Any:
    try:
        return plain_values.encode(value, "it")
    except JobError:
        return {_UNKNOWN: repr(seen(value, {}))}


def put(model: nn.Module, values: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """Give the modules of ``model`` the attributes that :class:`ModelAttributes` told."""
    modules = dict(model.named_modules())
    switch(model, switched(values))
    take_away(model, values)
    for prefix, own in values.items():
        if (module := modules.get(prefix)) is None:
            continue
        _put_passing_buffers(module, own.get(PASSING, {}).get("buffers", {}), device)
        there = {*module._parameters, *module._buffers, *module._modules}
        for key, value in own.items():
            if key == EXTRA:
                module.set_extra_state(plain_values.decode(value))
            elif (
                key not in there
                and key not in _NO_ATTRIBUTES
                and not (isinstance(value, Mapping) and _UNKNOWN in value)
                and not _holds_weights(vars(module).get(key))
            ):
                found = plain_values.restored(vars(module).get(key), value)
                follows = isinstance(found, torch.Tensor) and value.get("device") != "cpu"
                module.__dict__[key] = found.to(device) if follows else found


def take_away(model: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Take from the modules of ``model`` what :meth:`ModelAttributes.gone` told of others."""
    modules = dict(model.named_modules())
    for prefix, own in values.items():
        if GONE not in own or (module := modules.get(prefix)) is None:
            continue
        for key in own[GONE]["attributes"]:
            module.__dict__.pop(key, None)
        for key, as_none in own[GONE]["buffers"].items():
            if as_none:
                module._buffers[key] = None
            else:
                module._buffers.pop(key, None)


def _put_passing_buffers(module: nn.Module, buffers: Mapping[str, Any], device: torch.device) -> None:
    for key, encoded in buffers.items():
        now = module._buffers.get(key)
        found = plain_values.restored(now if encoded["written"] else None, encoded)
        if found is not now:
            found = found if encoded.get("device") == "cpu" else found.to(device)
            module.register_buffer(key, found, persistent=False)


def unswitched(values: Attributes) -> Attributes:
    """``values`` without what training has switched."""
    return {prefix: {k: v for k, v in own.items() if k != SWITCHED} for prefix, own in values.items()}


def switched(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What training has switched, for :func:`switch`."""
    return {prefix: plain_values.decode(own[SWITCHED]) for prefix, own in values.items() if SWITCHED in own}


def _holds_weights(value: Any) -> bool:
    """Whether an attribute lists parameters, as recurrent networks' do: earlier checkpoints had stand-ins of
    those that another rank trained."""
    return isinstance(value, list | tuple) and any(isinstance(part, nn.Parameter) for part in value)


def other_attributes(model: nn.Module) -> Attributes:
    """What can be seen of the attributes that no checkpoint can hold, to be compared with another time."""
    found: Attributes = {}
    memo: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        others = {key: value for key, value in _own(module) if not is_plain(value, objects=True)}
        found[prefix] = {key: seen(value, memo) for key, value in others.items()}
    return found


def spread(model: nn.Module) -> str | None:
    """The first attribute that holds parts of tensors which are spread over devices, besides parameters."""
    for prefix, module in model.named_modules():
        for key, value in _own(module):
            looked_at = isinstance(value, Mapping | list | tuple | set | deque | torch.Tensor)
            parts = tensors_in(value) if looked_at else ()
            if any(isinstance(part, DTensor) and not isinstance(part, nn.Parameter) for part in parts):
                return name_of(prefix, key)
    return None


def name_of(prefix: str, key: str) -> str:
    """An attribute as messages call it."""
    return f"{prefix}.{key}" if prefix else key


_NUMBERS_AND_TEXTS = frozenset({str, int, float, bool, type(None)})


def is_plain(
    value: Any, *, objects: bool = False, left: list[int] | None = None, deep: int = plain_values.DEEPEST
) -> bool:
    """Whether a checkpoint can hold it.

    :param objects: of the job's own classes, too, besides dataclasses.
    :param left: how many values there may be, and
    :param deep: in how many containers and objects; what holds itself has no end.
    """
    left = [_MOST] if left is None else left
    left[0] -= 1
    if left[0] < 0 or deep < 0:
        return False
    if type(value) in _NUMBERS_AND_TEXTS:  # of which there are the most
        return True
    are_plain = functools.partial(is_plain, objects=objects, left=left, deep=deep - 1)
    if isinstance(value, nn.Parameter | DTensor | nn.Module):
        return False
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.layout == torch.strided
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    if named or type(value) in (list, tuple, set, frozenset, deque):
        return all(map(are_plain, value))
    if isinstance(value, Mapping):
        return plain_values.is_mapping(value) and all(
            are_plain(part) for item in value.items() for part in item
        )
    if (fields := own_classes.fields_of(value)) is not None:
        known = objects or own_classes.is_dataclass(value)
        return known and all(map(are_plain, fields.values()))
    return plain_values.is_scalar(value)


def _in_python(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that TorchScript has not compiled: what those hold is no dictionary."""
    for prefix, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield prefix, module


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: buffer for key, buffer in module._buffers.items() if buffer is not None}


def _passing_buffers(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """The buffers that are not persistent, and how often each was written into."""
    passing = module._non_persistent_buffers_set
    return {key: (buffer, _version(buffer)) for key, buffer in _buffers(module).items() if key in passing}


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_as_it_was(now: torch.Tensor, then: torch.Tensor, version: int) -> bool:
    """Whether a buffer is what it was when ``then`` was in its place, written into ``version`` times."""
    unwritten = _version(then) == version
    return unwritten and (now is then or plain_values.equal(now, then))


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    left_out = plain_values.OF_MODULES | _OF_THIS_PROCESS
    return [(key, value) for key, value in list(vars(module).items()) if key not in left_out]


def seen(value: Any, memo: dict[int, Any], deep: int = _DEEP) -> Any:
    """A summary that is another one if something that can be seen has changed.

    :param memo: what was looked at already, by id.
    :param deep: how far to look into what ``value`` holds.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    # What is trained is not what an attribute keeps, as a recurrent network's list of its weights does.
    if isinstance(value, nn.Parameter | DTensor) or (isinstance(value, torch.Tensor) and value.requires_grad):
        return "trained"
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value), value._version)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return type(value).__name__, value.__module__, value.__qualname__
    if type(value).__module__.partition(".")[0] in own_classes.LIBRARIES:
        # Such as a configuration, in which transformers notes what it was called with.
        return type(value).__name__
    if (
        isinstance(value, nn.Module | type | types.ModuleType | logging.Logger)
        or callable(value)
        or id(value) in memo
        or not deep
    ):
        return type(value).__name__
    memo[id(value)] = value
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_lasti, seen(dict(frame.f_locals), memo, deep - 1))
    if isinstance(value, Iterator):
        return operator.length_hint(value, -1), [seen(part, memo, deep - 1) for part in _reduced(value)]
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in itertools.islice(value.items(), _LOOKED_AT)]
    elif isinstance(value, list | tuple | deque):
        parts = [("", part) for part in itertools.islice(value, _LOOKED_AT)]
    else:
        parts = list(itertools.islice(getattr(value, "__dict__", {}).items(), _LOOKED_AT))
    return [_length(value), *((key, seen(part, memo, deep - 1)) for key, part in parts)]


def _length(value: Any) -> int:
    try:
        return len(value) if isinstance(value, Sized) else 0
    except Exception:  # its class may refuse to say
        return 0


def _reduced(value: Any) -> list[Any]:
    """What an iterator of Python's own goes through, such as others, and where it stands."""
    try:
        _, through, *state = value.__reduce__()
    except Exception:
        return []
    return [*through, *(part for of in state for part in (of if isinstance(of, tuple) else (of,)))]
