"""Which Python modules hold the code of a job: what it keeps there changes as it trains."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from saturn_airflow.model import references
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.functions import names_in
from saturn_airflow.training.optim import own_classes


def python_modules(job: Job, model: nn.Module) -> set[str]:
    """Names of the Python modules that hold the code of the job's model, loss, optimizer and schedule, and of
    those of the job's own that they use.

    An installed package that the job names may have hundreds, such as a library of models: of these the ones
    count that code there has a name of, or a register that it has a name of.
    """
    # Techniques may put a class of their own before that of a module, as FSDP does.
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for reference in (job.load_model, job.loss_function, job.hparams.optimizer, job.hparams.lr_scheduler):
        if reference:
            # Who uses it says what is wrong with it.
            with contextlib.suppress(Exception):
                names |= _modules_of(references.load(str(reference)))
            names.add(str(reference).partition(":")[0])
    found = {name for name in names if name in sys.modules and not own_classes.is_library(name)}
    seen, used = set[str](), set[str]()
    while new := found - seen:
        used.update(*map(_names_in_code, new))
        seen |= new
        # What was looked at may have a name that is used only by now.
        beside = {name for module in found for name in _beside(module, used)}
        found |= {name for name in beside - found if name in sys.modules and own_classes.is_own(name)}
    return found


def _beside(name: str, used: set[str]) -> Iterator[str]:
    """The Python modules of what one imports; of what it uses or registers, where it is installed."""
    some = own_classes.is_installed(name) and _EVERYTHING not in used
    for key, value in list(vars(sys.modules[name]).items()):
        if not some:
            yield from _modules_of(value)
        elif key in used:
            for part in _parts_of(value):
                yield from _modules_of(part)


def _parts_of(value: Any) -> Iterator[Any]:
    """``value``, and what it holds if it is a register: a container, or an object that has one."""
    yield value
    if isinstance(value, functools.partial):
        yield value.func
    for held in (value, *(own_classes.fields_of(value) or {}).values()):
        if isinstance(held, dict) and len(held) <= _MOST_REGISTERED:
            yield from dict.values(held)  # a class of its own may import what is asked for
        elif type(held) in _CONTAINERS and len(held) <= _MOST_REGISTERED:
            yield from held


def _modules_of(value: Any) -> set[str]:
    """The name of the Python module that a value is, or that it or its class is of."""
    if isinstance(value, types.ModuleType):
        return {value.__name__}
    of = value if isinstance(value, type | types.FunctionType) else type(value)
    return {of.__module__ or ""}


# Who registers more has all of a library's models, each in a file that no other needs.
_CONTAINERS, _MOST_REGISTERED = frozenset({list, tuple, set, frozenset}), 256
_EVERYTHING = ""  # which is no name
_READING = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD"})


def _names_in_code(name: str) -> frozenset[str]:
    return _names_read(name, own_classes.file_of(name))


@functools.cache
def _names_read(name: str, file: str | None) -> frozenset[str]:
    """The names that the code of a Python module reads, those of attributes, too; :data:`_EVERYTHING` where
    there is no bytecode to be had.
    """
    spec = inspect.getattr_static(sys.modules[name], "__spec__", None)
    try:
        code = spec.loader.get_code(spec.name)
    except Exception:  # loaders may be anybody's
        code = None
    if code is None:
        return frozenset({_EVERYTHING})
    # What it imports itself, it need not use.
    read = {step.argval for step in dis.get_instructions(code) if step.opname in _READING}
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(read.union(*map(names_in, inner)))
