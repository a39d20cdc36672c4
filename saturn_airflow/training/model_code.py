"""The code that makes a model, found without running it: the user's own, and what is installed."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from saturn_airflow.model import references

#: What loading a model takes besides its own code.
ALWAYS = ("torch", "safetensors", "numpy")
# A larger file beside the code is hardly a part of it.
_LARGEST_BYTES = 50 * 2**20


def carry(reference: str, folder: Path) -> list[str]:
    """Copy the user's modules that ``reference`` needs to ``folder``: whole packages, and single modules.

    Modules that are imported by names which the source does not tell are missed, unless in these packages.

    :returns: what else is needed, as pip has it: the installed packages that those modules import, in the
        versions that are here.
    """
    installed = {*ALWAYS}
    own: dict[str, Path] = {}
    seen: set[str] = set()
    wanted = [reference.partition(":")[0]]
    while wanted:
        name = wanted.pop()
        top = name.partition(".")[0]
        if not top or name in seen or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        spec = references.find_spec(name)
        place = _place_of(top) if spec is not None else None
        if spec is None or place is None:
            continue
        if top == "saturn_airflow" or _is_installed(place):
            installed.add(top)
            continue
        own[top] = place
        if spec.origin and spec.origin.endswith(".py"):
            wanted.extend(_imported(Path(spec.origin), name, spec.submodule_search_locations is not None))
    folder.mkdir(parents=True, exist_ok=True)
    for place in own.values():
        _copy(place, folder)
    return sorted(_requirement(top) for top in installed)


def _place_of(top: str) -> Path | None:
    """The folder of a package, or the file of a module."""
    spec = references.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None


def _is_installed(place: Path) -> bool:
    paths = sysconfig.get_paths()
    roots = {paths["purelib"], paths["platlib"], paths["stdlib"], *site.getsitepackages()}
    roots.add(site.getusersitepackages())
    if any(place.resolve().is_relative_to(Path(root).resolve()) for root in roots):
        return True
    # Other folders of installed packages come by PYTHONPATH and .pth files. Some installers leave links, to
    # where they keep packages for all environments; so do people, to what they work on, which no
    # distribution has.
    return place.name in _recorded(str(place.parent))


@functools.lru_cache(maxsize=8)
def _recorded(folder: str) -> frozenset[str]:
    """Files and folders directly in ``folder`` that the distributions there have."""
    records = (found.read_text("RECORD") or "" for found in importlib.metadata.distributions(path=[folder]))
    return frozenset(re.split("[/,]", line)[0] for record in records for line in record.splitlines())


def _imported(file: Path, module: str, is_package: bool) -> Iterator[str]:
    """Names of the modules that a file's source imports, and of what may be modules in packages."""
    package = module if is_package else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))


def _copy(place: Path, to: Path) -> None:
    if place.is_file():
        shutil.copyfile(place, to / place.name)
        return

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name.startswith(".")
            or name == "__pycache__"
            or not (path := Path(folder, name)).exists()
            or (path.is_file() and path.stat().st_size > _LARGEST_BYTES)
        }

    shutil.copytree(place, to / place.name, ignore=left_out, dirs_exist_ok=True)


def _requirement(top: str) -> str:
    name = "saturn-airflow" if top == "saturn_airflow" else _distribution_of(top)
    try:
        # No index has the part behind the plus, which says what it was built for.
        return f"{name}=={importlib.metadata.version(name).partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return name


def _distribution_of(top: str) -> str:
    """The name of the distribution that the installed package ``top`` is of."""
    # Most are named like their package; to look through all that is installed takes a quarter of a second.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution(top)
        if f"\n{top}/__init__.py," in f"\n{found.read_text('RECORD')}":
            return str(found.metadata["Name"])
    return _distributions(tuple(sys.path)).get(top, [top])[0]


@functools.lru_cache(maxsize=1)
def _distributions(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Names of distributions by the packages they have, of all that ``path`` (``sys.path``) finds."""
    return importlib.metadata.packages_distributions()
