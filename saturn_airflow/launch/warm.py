"""What the server of launched processes imports before it forks.

Torch, Saturn's own loop, and the heavy libraries that the job's modules import, as far as those are known to
be harmless to fork after. The job's modules themselves are never imported here: they might touch CUDA, or
start threads, and what is forked afterwards would be broken.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_VARIABLE = "SATURN_WARM_IMPORTS"
_ALWAYS = [
    # What each fork is first; imported there, it would take memory in each that waits for devices.
    "saturn_airflow.launch.supervisor",
    *(
        f"saturn_airflow.training.{name}"
        for name in ("ranks", "session", "loop", "exports", "guarding.guarded")
    ),
    # What torch itself imports where the first optimizer is made.
    "torch._dynamo",
]
_HARMLESS = {"datasets", "numpy", "pandas", "PIL", "scipy", "sklearn", "torch", "torchvision", "transformers"}


def prepare(references: Iterable[str | None]) -> None:
    """Let servers started from now on import what ``"module:name"`` references will import."""
    wanted = dict.fromkeys(name for reference in references if reference for name in _imports(reference))
    os.environ[_VARIABLE] = ",".join(wanted)


def _imports(reference: str) -> Iterator[str]:
    """What a module and its named function import of what is harmless, as ``module`` or ``module:name``."""
    module, _, function = reference.partition(":")
    if module.split(".")[0] in _HARMLESS or (source := _source(module)) is None:
        return
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return
    named = [node for node in statements if isinstance(node, ast.FunctionDef) and node.name == function]
    for node in [*statements, *(inner for outer in named for inner in ast.walk(outer))]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_harmless(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_harmless(node.module or ""):
            yield from (f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*")


def _is_harmless(module: str) -> bool:
    return module.split(".")[0] in _HARMLESS


def _source(module: str) -> bytes | None:
    """The source of ``module``, found without importing anything."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            return None
        if not rest:
            return Path(spec.origin).read_bytes()
        path = Path(spec.origin).parent.joinpath(*rest)
        return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_bytes()
    except (ImportError, OSError, ValueError):
        return None


_touched = False  # it does not pass


def import_for(references: Iterable[str], path: Iterable[str]) -> None:
    """Import here what ``"module:name"`` references will import.

    :param path: folders their modules may be in besides Python's own.
    """
    search_path = list(sys.path)
    sys.path.extend(path)
    importlib.invalidate_caches()
    try:
        wanted = dict.fromkeys(name for reference in references for name in _imports(reference))
    finally:
        sys.path[:] = search_path
    _import(wanted)


def import_all() -> None:
    """Import here what every run needs, and what :func:`prepare` has asked for."""
    _import([*_ALWAYS, *filter(None, os.environ.get(_VARIABLE, "").split(","))])


def why_not_to_fork() -> str | None:
    """Why what is forked from this process now might be broken; None where nothing is known to be wrong.

    Threads that are not Python's can't be told apart here: those of OpenBLAS, which are there wherever numpy
    is, see to forks themselves (``pthread_atfork``).
    """
    if others := [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]:
        return f"threads were started: {', '.join(others)}"
    torch = sys.modules.get("torch")
    return "CUDA was touched" if torch is not None and _has_touched_cuda(torch) else None


def _has_touched_cuda(torch: Any) -> bool:
    """Whether this process asked CUDA for anything, be it how many GPUs there are: a fork of it can't use
    CUDA, as torch can only tell there."""
    global _touched
    if _touched or torch.cuda.is_initialized():
        return True
    if not torch.backends.cuda.is_built():
        return False
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, bytes([torch.cuda._is_in_bad_fork()]))
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as told:
        _touched = told.read() != b"\0"
    return _touched


def _import(names: Iterable[str]) -> None:
    for name in names:
        module, _, attribute = name.partition(":")
        # What is missing or broken is met again, and told, where it is needed.
        with contextlib.suppress(Exception):
            imported = importlib.import_module(module)
            if attribute:
                # Libraries such as transformers import the parts they are asked for.
                getattr(imported, attribute)
