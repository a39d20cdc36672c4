"""Which modules a reference may name: jobs are data, and who writes data must not run any code there is.

Python's standard library never, since ``os:system`` is a reference too, nor this package, whose functions
start processes. Where ``[saturn] allowed_modules`` is set, nothing else than what it names; processes that
run users' code are told by an environment variable.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Collection
from importlib.machinery import ModuleSpec
from typing import Any

from saturn_airflow.model.errors import InvalidSweepError

#: Module names with commas between them; each allows what is below it, too.
VARIABLE = "SATURN_ALLOWED_MODULES"
#: What any job may name: optimizers and schedulers.
ALWAYS = ("torch.optim",)
_OWN = ("saturn_airflow",)


def configured() -> tuple[str, ...]:
    """The modules that this process may load references from; empty for all but the standard library."""
    return parse(os.environ.get(VARIABLE, ""))


def parse(text: str) -> tuple[str, ...]:
    """The names of ``"shop, transformers"``.

    :raises InvalidSweepError: when one of them can't be a module's.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise InvalidSweepError(
                f"[saturn] allowed_modules has {name!r}; write names of modules with commas between them, "
                "such as shop, transformers (each allows what is below it, too)"
            )
    return names


def covers(allowed: Collection[str], module: str) -> bool:
    """Whether one of ``allowed`` is the module or above it."""
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def check_module(
    module: str,
    find_spec: Callable[[str], ModuleSpec | None],
    what: str,
    allowed: Collection[str] | None = None,
) -> None:
    """Refuse a module that references must not name, before it is imported.

    :param find_spec: says where a module is found, without importing it.
    :param what: how the message begins, such as ``"job 'a': load_model 'os:system'"``.
    :param allowed: names of modules; None for what is configured.
    :raises InvalidSweepError: naming the setting.
    """
    allowed = configured() if allowed is None else allowed
    if covers(allowed, module):
        return
    if module.split(".")[0] in sys.stdlib_module_names and _is_standard(module, find_spec(module)):
        raise InvalidSweepError(
            f"{what}: {module!r} is of Python's standard library, which jobs can't name; write a function of "
            "your own that calls it"
        )
    if covers(_OWN, module):
        raise InvalidSweepError(
            f"{what}: {module!r} is Saturn's own, which jobs can't name; write a function of your own that "
            "calls it"
        )
    if allowed and not covers(ALWAYS, module):
        raise InvalidSweepError(
            f"{what}: module {module!r} is not among [saturn] allowed_modules ({', '.join(allowed)}); "
            "whoever runs this deployment may add it"
        )


def check_found(found: Any, module: str, what: str, allowed: Collection[str] | None = None) -> None:
    """Refuse a function or class that its module merely imports from where references may name nothing.

    :param allowed: names of modules; None for what is configured.
    :raises InvalidSweepError: as :func:`check_module`.
    """
    allowed = configured() if allowed is None else allowed
    origin = getattr(found, "__module__", None)
    if not (inspect.isroutine(found) or inspect.isclass(found)) or not isinstance(origin, str):
        return
    if origin == module or covers(allowed, origin):
        return
    here = f"{what}: it is {origin}.{found.__name__}"
    known = sys.modules.get(origin)
    if _is_standard(origin, getattr(known, "__spec__", None)):
        raise InvalidSweepError(
            f"{here} of Python's standard library, which jobs can't name; write a function of your own that "
            "calls it"
        )
    if covers(_OWN, origin):
        raise InvalidSweepError(f"{here}, which is Saturn's own; write a function of your own that calls it")
    if allowed and not covers(ALWAYS, origin):
        raise InvalidSweepError(
            f"{here}, and module {origin!r} is not among [saturn] allowed_modules ({', '.join(allowed)}); "
            "whoever runs this deployment may add it"
        )


def _is_standard(module: str, spec: ModuleSpec | None) -> bool:
    """Whether it is the standard library's, and not one of the user's that happens to have such a name."""
    if module.split(".")[0] not in sys.stdlib_module_names:
        return False
    origin = spec.origin if spec is not None else None
    if origin is None or origin in ("built-in", "frozen"):
        return True
    paths = sysconfig.get_paths()
    installed = any(origin.startswith(paths[name] + os.sep) for name in ("purelib", "platlib"))
    return not installed and any(origin.startswith(paths[name] + os.sep) for name in ("stdlib", "platstdlib"))
