"""Which modules import each other in a circle, where imports within functions and for types count, too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imports() -> dict[str, set[str]]:
    """The modules that each module of the package imports, wherever that is written."""
    files = {}
    for path in (ROOT / "saturn_airflow").rglob("*.py"):
        parts = path.relative_to(ROOT / "saturn_airflow").with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    found = {}
    for module, path in files.items():
        own: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                own |= {alias.name.partition(".")[2] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                package = node.module.partition(".")[2]
                names = {alias.name: f"{package}.{alias.name}" for alias in node.names}
                own |= {full if full in files else package for full in names.values()}
        found[module] = {name for name in own if name and name != module and name in files}
    return found


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules of which each imports each, by way of others of the set."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for module in graph[ahead.pop()] - seen:
                seen.add(module)
                ahead.append(module)
        return seen

    all_reached = {module: reached(module) for module in graph}
    return {
        frozenset(other for other in there if module in all_reached[other])
        for module, there in all_reached.items()
        if module in there
    }


def test_circles_are_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(graph) == {frozenset({"b", "c"})}


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    assert [sorted(circle) for circle in circles(imports())] == []
