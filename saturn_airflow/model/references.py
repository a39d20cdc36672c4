"""`module:name` references: callables as plain data that fits in JSON.

A reference is checked without running its module, because DAG files are parsed again and again on
machines that may have neither the time nor the memory for torch.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from saturn_airflow.model import allowed_modules
from saturn_airflow.model.arguments import unknown
from saturn_airflow.model.errors import InvalidSweepError

#: The top-level packages of what has been loaded here.
packages: set[str] = set()
# How often what a module imports from another is looked up there.
_IMPORTS = 3
_REFERENCE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# Airflow loads a DAG file under a name of its own; its functions are found again by the file's stem.
_DAG_FILE_MODULE = re.compile(r"^unusual_prefix_[0-9a-f]+_(?P<stem>.+)$")


def to_reference(value: object, what: str, example: str = "shop.models:gpt2") -> str:
    """Return ``value`` as ``"module:name"``.

    :param value: a reference, or a module-level function or class.
    :param what: how messages name it, for example ``"job 'gpt2': load_model"``.
    :param example: one that fits, for the message.
    :raises InvalidSweepError: for a lambda, a closure, a method, or text of another shape.
    """
    if isinstance(value, str):
        if not _REFERENCE.fullmatch(value):
            raise InvalidSweepError(
                f"{what}: {value!r} is not a reference; write 'module:name', such as {example!r}"
            )
        return value
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None)
    if not callable(value) or name is None or module is None:
        raise InvalidSweepError(
            f"{what}: a {type(value).__name__} is not a reference; write 'module:name' or pass a function"
        )
    if name == "<lambda>" or "<locals>" in name or "." in name:
        kind = (
            "a lambda" if name.endswith("<lambda>") else f"{name!r}, which is defined inside something else,"
        )
        raise InvalidSweepError(
            f"{what}: {kind} can't be found again by the processes that train; "
            "define a function at the top level of a module and pass it or its 'module:name'"
        )
    if in_dag := _DAG_FILE_MODULE.match(module):
        module = in_dag["stem"]
    if module == "__main__":
        raise InvalidSweepError(
            f"{what}: {name!r} is defined in the script being run; move it to a module of its own"
        )
    return f"{module}:{name}"


def load(reference: str, allowed: Collection[str] | None = None) -> Any:
    """Import and return what a job's ``reference`` names (not when a DAG file is parsed).

    :param allowed: the modules it may be of; None for what is configured.
    :raises InvalidSweepError: when the module or the name does not exist, or may not be named.
    """
    check_allowed(reference, "a reference", allowed)
    found = resolve(reference)
    module = reference.partition(":")[0]
    allowed_modules.check_found(found, module, f"reference {reference!r}", allowed)
    packages.add(module.partition(".")[0])
    return found


def check_allowed(reference: str, what: str, allowed: Collection[str] | None = None) -> None:
    """Check that ``reference`` is of a module that jobs may name.

    :raises InvalidSweepError: when it is not.
    """
    module = reference.partition(":")[0]
    allowed_modules.check_module(module, find_spec, f"{what} {reference!r}", allowed)


def resolve(reference: str) -> Any:
    """Import and return what a ``reference`` of this package's own names, wherever it is.

    :raises InvalidSweepError: when the module or the name does not exist.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise InvalidSweepError(f"{reference!r}: there is no module {error.name!r} here") from None
        raise
    try:
        return getattr(module, name)
    except AttributeError:
        raise InvalidSweepError(f"{reference!r}: module {module_name!r} has no {name!r}") from None


def check(reference: str, what: str) -> None:
    """Check that ``reference`` exists, as far as can be seen without importing it.

    Top-level packages that are not installed where DAGs are parsed are an error too, except torch,
    which only the nodes need.

    :raises InvalidSweepError: when the module is not found, or its source defines no such name.
    """
    module_name, _, name = reference.partition(":")
    spec = find_spec(module_name)
    if spec is None:
        if module_name.split(".")[0] == "torch" and find_spec("torch") is None:
            return
        raise InvalidSweepError(
            f"{what}: there is no module {module_name!r} (of {reference!r}); "
            "check the spelling, put it where DAGs are parsed (beside the DAG file, in plugins/), "
            "or leave the check to the nodes with [saturn] check_references = False"
        )
    names = _top_level_names(spec.origin)
    if names is not None and name not in names:
        raise InvalidSweepError(f"{what}: module {module_name!r} has no {name!r} (of {reference!r})")


def check_arguments(reference: str, what: str, given: Iterable[str], also: Iterable[str] = ()) -> None:
    """Check that what ``reference`` names takes these arguments and needs no others, as its source tells.

    :param also: arguments that it is given if it takes them.
    :raises InvalidSweepError: naming the one that is wrong or missing.
    """
    if (takes := parameters(reference)) is None:
        return
    if wrong := [name for name in given if name not in takes.names]:
        raise InvalidSweepError(f"{what}: {unknown(wrong[0], takes.names)}")
    if lacking := [name for name in takes.needed if name not in {*given, *also}]:
        elsewhere = ", or as HParams(batch_size=...)" if lacking[0] == "batch_size" else ""
        raise InvalidSweepError(f"{what}: it needs {lacking[0]!r}; give it there{elsewhere}")


class ParameterNames(NamedTuple):
    """What a function takes by name: all of it, and what it can't be called without."""

    names: tuple[str, ...]
    needed: tuple[str, ...]


def parameters(reference: str) -> ParameterNames | None:
    """What the function or class that ``reference`` names takes, from its source.

    None where the source does not tell: something decorated, what is inherited, or ``**kwargs``.
    """
    found = _definition(reference)
    if not isinstance(found, ast.ClassDef):
        return None if found is None else _taken_by(found)
    made = _methods(found)
    if found.decorator_list or found.keywords or "__init__" not in made or "__new__" in made:
        return None
    takes = _taken_by(made["__init__"])
    if takes is None or not takes.names:  # it takes *args
        return None
    return ParameterNames(takes.names[1:], tuple(one for one in takes.needed if one != takes.names[0]))


def is_class_with(reference: str, method: str) -> bool:
    """Whether ``reference`` names a class whose own source has ``method``; False where that does not tell."""
    found = _definition(reference)
    return isinstance(found, ast.ClassDef) and not found.decorator_list and method in _methods(found)


def _definition(reference: str, depth: int = 0) -> ast.FunctionDef | ast.ClassDef | None:
    """The source of what ``reference`` names; None where it has none, or several that may be it.

    :param depth: of how many imports the reference is known.
    """
    module_name, _, name = reference.partition(":")
    spec = find_spec(module_name) if name else None
    found = _definitions(spec.origin).get(name, []) if spec is not None else []
    if len(found) == 1 and isinstance(found[0], ast.ImportFrom) and spec is not None and depth < _IMPORTS:
        origin = absolute(found[0], spec.parent or "")
        (alias,) = [one for one in found[0].names if (one.asname or one.name) == name]
        return _definition(f"{origin}:{alias.name}", depth + 1)
    only = found[0] if len(found) == 1 else None
    return only if isinstance(only, ast.FunctionDef | ast.ClassDef) else None


def _methods(made: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}


def _taken_by(function: ast.FunctionDef) -> ParameterNames | None:
    """The arguments that a function takes; None where its source does not tell."""
    takes = function.args
    if function.decorator_list or takes.kwarg or takes.posonlyargs:
        return None
    of_defaults = len(takes.args) - len(takes.defaults)
    only = zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
    needed = [*takes.args[:of_defaults], *(one for one, default in only if default is None)]
    names = [*takes.args, *takes.kwonlyargs]
    return ParameterNames(tuple(one.arg for one in names), tuple(one.arg for one in needed))


def imported_by(reference: str) -> list[str]:
    """What a module's source may import under the name that ``reference`` has, as references.

    Empty where the module defines it, or has no source.
    """
    module_name, _, name = reference.partition(":")
    spec = find_spec(module_name)
    tree = _source(spec.origin) if spec is not None else None
    if spec is None or tree is None:
        return []
    package = spec.name if spec.submodule_search_locations else spec.name.rpartition(".")[0]
    nodes = list(_run_by_import(tree))
    imports = [(node, alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    found = [(node, alias.name) for node, alias in imports if name == (alias.asname or alias.name)]
    lines = [node.lineno for node in nodes if name == _made_by(node)] + [node.lineno for node, _ in found]
    # Whatever a star brings replaces what was there before.
    found += [
        (node, name) for node, alias in imports if alias.name == "*" and node.lineno > max(lines, default=0)
    ]
    return [f"{absolute(node, package)}:{what}" for node, what in found]


def _run_by_import(tree: ast.Module) -> Iterator[Any]:
    """The nodes of a module's source outside of functions and classes, and these themselves."""
    waiting: list[Any] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


def _made_by(node: ast.AST) -> str | None:
    """The name that a node gives to something that is not imported."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return getattr(node, "name", None) if isinstance(node, _SCOPES) else None


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that ``from ... import`` names, in a module of ``package``."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


@lru_cache(maxsize=64)
def _definitions(origin: str | None) -> dict[str, list[ast.stmt]]:
    """The statements at the top level of a module that may define each name."""
    tree, found = _source(origin), dict[str, list[ast.stmt]]()
    for statement in tree.body if tree is not None else []:
        for name in _defined_by(statement):
            found.setdefault(name, []).append(statement)
    return found


def _defined_by(statement: ast.stmt) -> set[str]:
    """Names that a statement at the top level of a module may define."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    nodes = list(ast.walk(statement))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    aliases = [
        alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    ]
    return (
        {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        | {node.name for node in nodes if isinstance(node, functions)}
        | {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    )


# What was looked up where each module is looked up once.
_known: dict[str, importlib.machinery.ModuleSpec | None] | None = None


@contextlib.contextmanager
def looked_up_once() -> Iterator[None]:
    """While many references are checked: where a module is, is looked up once for all that name it."""
    global _known
    before, _known = _known, {}
    try:
        yield
    finally:
        _known = before


def find_spec(module_name: str) -> importlib.machinery.ModuleSpec | None:
    """Like importlib.util.find_spec, but without importing the parent packages."""
    known = {} if _known is None else _known
    if module_name not in known:
        known[module_name] = _look_up(module_name)
    return known[module_name]


def _look_up(module_name: str) -> importlib.machinery.ModuleSpec | None:
    path: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module_name.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is importlib.machinery.PathFinder and path is not None:
                spec = _in_folders(name, path)
            else:
                spec = find(name, path) if find else None
            if spec is not None:
                break
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth + 1 < len(parts):
            return None
    return spec


def _in_folders(name: str, folders: Iterable[str]) -> importlib.machinery.ModuleSpec | None:
    """What ``PathFinder`` finds; that wants a folder without ``__init__.py`` to have an imported parent."""
    parts: list[str] = []
    for folder in folders:
        importer = pkgutil.get_importer(folder)
        found = importer.find_spec(name) if importer is not None else None
        if found is not None and found.loader is not None:
            return found
        parts += (found.submodule_search_locations or []) if found is not None else []
    if not parts:
        return None
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = parts
    return spec


@lru_cache(maxsize=64)
def _source(origin: str | None) -> ast.Module | None:
    if origin is None or not origin.endswith(".py") or not Path(origin).is_file():
        return None
    try:
        return ast.parse(Path(origin).read_bytes())
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=256)
def _top_level_names(origin: str | None) -> frozenset[str] | None:
    """Names a module's source defines at its top level; None where that can't be told."""
    if (tree := _source(origin)) is None:
        return None
    names = frozenset(_definitions(origin))
    tells = not names & {"*", "__getattr__"} and not any(isinstance(n, ast.Global) for n in ast.walk(tree))
    return names if tells else None


Reference = str | Callable[..., Any]
