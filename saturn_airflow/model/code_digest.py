"""What a job's own code says, as far as its source tells: verdicts of the guard are of that code.

Nothing is imported: where plans are made there may be no torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from saturn_airflow.model import references

_INSTALLED = ("site-packages", "dist-packages")
# Their versions count in another way.
_SATURN = ("saturn_airflow", "techniques")
# Hexadecimal digits.
_LENGTH = 16


def of(named: frozenset[str]) -> str:
    """A digest of the modules that references (``"module:name"``) name, and of all that these import.

    It counts what the files of the job's own modules say, and of installed packages their versions. A module
    that is not found, as where DAGs are parsed without it, adds nothing. A process looks once.

    :returns: 16 hexadecimal digits; empty where no module is found.
    """
    own, installed = _modules(named)
    return _digest({**own, **{package: _version(package) for package in installed}})


def of_own(named: frozenset[str]) -> str:
    """As :func:`of`, of the job's own modules alone: what packages are installed differs between machines."""
    return _digest(_modules(named)[0])


def _digest(says: Mapping[str, str]) -> str:
    told = "\n".join(f"{name} {what}" for name, what in sorted(says.items()))
    return hashlib.sha256(told.encode()).hexdigest()[:_LENGTH] if told else ""


@lru_cache(maxsize=1024)
def _modules(named: frozenset[str]) -> tuple[Mapping[str, str], frozenset[str]]:
    """The job's own modules, each with a digest of its file, and the installed packages that they import."""
    seen, own, installed = set[str](), dict[str, str](), set[str]()
    waiting = [name for reference in named for name in _with_parents(reference.partition(":")[0])]
    with references.looked_up_once():
        while waiting:
            name = waiting.pop()
            package = name.partition(".")[0]
            if name in seen or package in _SATURN or package in sys.stdlib_module_names:
                continue
            seen.add(name)
            if _is_installed(references.find_spec(package)):
                installed.add(package)
            elif (spec := references.find_spec(name)) is not None and (source := _source(spec)) is not None:
                own[name] = hashlib.sha256(source).hexdigest()
                waiting += _imported_by(source, spec)
    return own, frozenset(installed)


def _is_installed(spec: ModuleSpec | None) -> bool:
    places: Iterable[str | None] = (
        () if spec is None else (spec.origin, *(spec.submodule_search_locations or ()))
    )
    return any(part in _INSTALLED for place in places if place for part in Path(place).parts)


def _source(spec: ModuleSpec) -> bytes | None:
    try:
        return Path(spec.origin).read_bytes() if spec.origin and spec.has_location else None
    except OSError:
        return None


def _imported_by(source: bytes, spec: ModuleSpec) -> Iterator[str]:
    """What a module may import, wherever in it; of names that it imports from others not all are modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # an extension module, say
        return
    package = spec.name if spec.submodule_search_locations else spec.name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = references.absolute(node, package)
            yield from _with_parents(module)
            for alias in node.names:
                yield f"{module}.{alias.name}"


def _with_parents(module: str) -> Iterator[str]:
    """The module, and the packages that are imported with it."""
    parts = module.split(".")
    for depth in range(len(parts)):
        yield ".".join(parts[: depth + 1])


@lru_cache(maxsize=1024)
def _version(package: str) -> str:
    """Of an installed package, whatever its distribution is called: ``sklearn`` is of scikit-learn."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        names = sorted(set(_distributions().get(package, ())))
        return " ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


@lru_cache(maxsize=1)
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()  # of all that is installed: most of a second
