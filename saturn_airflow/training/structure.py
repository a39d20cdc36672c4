"""What a model is made of, which a job that is resumed has as ``load_model`` makes it: modules, parameters,
functions and hooks, and the functions among the global variables of the job's code.

A trial sees what the first steps do to it; what changes later no checkpoint would have.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from saturn_airflow.model.jobs import Job
from saturn_airflow.training import functions
from saturn_airflow.training.optim import own_classes, plain_values
from saturn_airflow.training.used_modules import python_modules

#: The steps that a trial compares, and in which models make what they need.
FIRST_STEPS = 3

_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType),
    *(functools.partial, type),
)
_MOST_ITEMS, _DEEPEST = 1000, 3  # that are looked at of an attribute, and how deep they may be nested
_IN_EACH_STEP = "made in each step"
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Structure:
    """What ``model`` is made of as training begins.

    :param made_first: what :attr:`made_first` told in the process that began the job.
    """

    def __init__(
        self, job: Job, model: nn.Module, made_first: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._job, self._model = job, model
        self._given = {name: _identity(part) for name, part in self._now().items()}
        self._parameters = _parameters(model)
        #: What the job's first steps make, by where it is: each process makes that anew.
        self.made_first = dict(made_first)
        self._varies, self._stays, self._noted = set[str](), set[str](), 0

    def note_first_steps(self, step: int) -> None:
        """Take what has changed by now as what each process makes as it begins; after each first step.

        :param step: the number of steps that are done.
        """
        first, now = self.made_first, self._changed()
        if step != self._noted:
            self._noted, known = step, now.keys() & first.keys()
            self._varies |= {name for name in known if first[name] != now[name]}
            self._stays |= {name for name in known if first[name] == now[name]}
        now |= dict.fromkeys(self._other_parameters(), "")
        each = self._varies - self._stays
        self.made_first |= {name: _IN_EACH_STEP if name in each else text for name, text in now.items()}

    def changed(self) -> list[str]:
        """Where something else is by now, but for parameters and what each step makes anew: whether a step
        needs what the one before made, the trial has seen."""
        # What comes into a container later, such as a cache, takes no other's place.
        replaced = {
            name: now
            for name, now in self._changed().items()
            if "[" not in name or name in self._given or name in self.made_first
        }
        as_first = {name: {now, _IN_EACH_STEP} for name, now in replaced.items()}
        return [name for name, known in as_first.items() if self.made_first.get(name) not in known]

    def other_parameters(self) -> list[str]:
        """The names of parameters that are not those that training began with."""
        return [name for name in self._other_parameters() if name not in self.made_first]

    def _now(self) -> dict[str, Any]:
        return {**_parts(self._model), **_global_functions(self._job, self._model)}

    def _changed(self) -> dict[str, str]:
        """What is there now, as a text that is the same in other processes."""
        parts, given = self._now(), self._given
        now = {name: _identity(part, whole=name not in given) for name, part in parts.items()}
        names = {**given, **now}
        return {name: _text(now.get(name)) for name in names if given.get(name) != now.get(name)}

    def _other_parameters(self) -> list[str]:
        now = _parameters(self._model)
        there = {*self._parameters, *now}
        return sorted(name for name in there if self._parameters.get(name) is not now.get(name))


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _parts(model: nn.Module) -> dict[str, Any]:
    """Modules, their hooks and functions, and the hooks of parameters, by name."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        own = list(vars(module).items())
        place = f"{prefix}." if prefix else ""
        found[prefix or "the model"] = module
        for key, value in own:
            if isinstance(value, _FUNCTIONS) or key not in plain_values.OF_MODULES:
                found |= _functions_in(place + key, value)
        hooks = {key: v.values() for key, v in own if key.endswith("_hooks") and isinstance(v, dict)}
        hooked = [(key, hook) for key, held in hooks.items() for hook in held if _counts(hook)]
        if hooked:
            found[f"the hooks of {prefix or 'the model'}"] = hooked
    for name, parameter in (*model.named_parameters(), *_gathered(model)):
        kinds = {key: getattr(parameter, key, None) or {} for key in _HOOKS}
        if told := [(key, hook) for key, held in kinds.items() for hook in held.values()]:
            found[f"the hooks of {name}"] = told
    return found


def _functions_in(name: str, value: Any) -> dict[str, Any]:
    """The functions that ``value`` is, or has in its items and attributes, by where they are: of the first
    :data:`_MOST_ITEMS`, for what has more is data.
    """
    found: dict[str, Any] = {}
    waiting, looked = [(name, value, _DEEPEST)], 0
    while waiting and looked < _MOST_ITEMS:
        looked += 1
        place, one, deep = waiting.pop()
        if isinstance(one, _FUNCTIONS):
            found[place] = one
        elif deep:
            waiting += [(f"{place}[{key!r}]", item, deep - 1) for key, item in _items_of(one).items()]
    return found


def _items_of(value: Any) -> dict[Any, Any]:
    """What a container holds, or an object of one of the job's own classes."""
    if type(value) in (list, tuple, dict):
        if len(value) > _MOST_ITEMS:
            return {}
        items = value.items() if type(value) is dict else enumerate(value)
        return {key: item for key, item in list(items) if isinstance(key, str | int)}
    return own_classes.fields_of(value) or {}


def _gathered(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What FSDP makes of its shards for each pass, on which a hook of the model's is then."""
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for number, parameter in enumerate(group.fsdp_params):
                    if hasattr(parameter, "_unsharded_param"):
                        yield f"parameter {number} of {prefix or 'the model'}", parameter.unsharded_param


def _counts(hook: Any) -> bool:
    """Whether a hook is none of those by which transformers notes outputs once it is asked for them."""
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


def _global_functions(job: Job, model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in sorted(python_modules(job, model)):
        for name, value in list(vars(sys.modules[module]).items()):
            if not name.startswith("__"):
                found |= _functions_in(f"{module}.{name}", value)
    return found


def _identity(part: Any, *, whole: bool = False, within: tuple[Any, ...] = ()) -> Any:
    """What is another once ``part`` is replaced: by another module or hook, or a function that computes
    something else.

    :param whole: with the numbers and texts that closures keep. A checkpoint keeps those of functions that
        were there from the first.
    :param within: the functions that keep ``part``, which it may keep, too.
    """
    if isinstance(part, list):
        return [(kind, _identity(hook, whole=whole)) for kind, hook in part]
    if isinstance(part, nn.Module):
        return part
    if isinstance(part, types.MethodType):
        return _identity(part.__func__, whole=whole, within=within), type(part.__self__)
    if any(part is one for one in within):
        return type(part)
    if isinstance(part, functools.partial):
        return (
            functools.partial,
            _identity(part.func, whole=whole, within=within),
            *_kept(part, whole, within),
        )
    if isinstance(part, types.FunctionType):
        return part.__code__, *_kept(part, whole, within)
    if isinstance(part, _FUNCTIONS):
        return getattr(part, "__module__", None), getattr(part, "__qualname__", None)
    return type(part)


def _kept(function: Any, whole: bool, within: tuple[Any, ...]) -> Iterator[Any]:
    """The defaults, given arguments and closure of ``function``, where something else may be."""

    def value_of(value: Any, plain: bool) -> Any:
        if isinstance(value, _FUNCTIONS):
            return _identity(value, whole=whole, within=(*within, function))
        return repr(value) if plain and isinstance(value, _PLAIN) else type(value)

    for step, value, _ in functions.parts_of(function):
        if step in ("[defaults]", "[arguments]"):
            yield step, *(value_of(one, True) for one in value)
        elif step.startswith("[closure"):
            yield step, value_of(value, whole)


def _text(identity: Any) -> str:
    if isinstance(identity, list | tuple):
        return ", ".join(map(_text, identity))
    if isinstance(identity, frozenset):
        return ", ".join(sorted(map(_text, identity)))
    if isinstance(identity, types.CodeType):
        says = (identity.co_consts, identity.co_names, identity.co_varnames)
        told = identity.co_code + ", ".join(map(_text, says)).encode()
        return f"{identity.co_name} {hashlib.sha1(told).hexdigest()}"
    return type(identity).__qualname__ if isinstance(identity, nn.Module) else repr(identity)
