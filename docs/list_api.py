"""Write the reference of the Python API from its docstrings: ``python docs/list_api.py``.

Each name stands in docs/reference.md between two comments, with its summary and a table of its parameters.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
_PART = re.compile(r"<!-- api: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
_FIELD = re.compile(r"^:(param|returns|raises|ivar) ?([^:]*):", re.MULTILINE)
#: What needs no module of its own to be imported from.
_AT_THE_TOP = (ROOT / "saturn_airflow" / "__init__.py").read_text().partition("__all__")[2]
_ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):`~?\.*([^`]*)`")

Documented = ast.ClassDef | ast.FunctionDef


def written(page: str) -> str:
    """``page`` with what the docstrings say."""
    return _PART.sub(lambda found: f"<!-- api: {found[1]} -->\n{_entry(found[1])}<!-- end -->", page)


def _entry(dotted: str) -> str:
    module, _, name = dotted.rpartition(".")
    node = _find(module, name)
    docstring = ast.get_docstring(node) or ""
    summary, *fields = _split(docstring)
    parts = [f"### `{_signature(node, name)}`", _text(summary, paragraphs=True)]
    if f'"{name}"' not in _AT_THE_TOP:
        parts.insert(1, f"`from {module} import {name}`")
    if rows := [(name, text) for kind, name, text in fields if kind in ("param", "ivar")]:
        lines = [f"| `{name}` | {_text(text).replace('|', chr(92) + '|')} |" for name, text in rows]
        parts.append("\n".join(["| argument | what |", "| --- | --- |", *lines]))
    for kind, name, text in fields:
        if kind in ("returns", "raises"):
            parts.append(f"*{kind.capitalize()}* {f'`{name}` ' if name else ''}{_text(text)}")
    if isinstance(node, ast.ClassDef):
        parts += [_method(child) for child in node.body if _is_shown(child)]
    return "\n\n".join(parts) + "\n"


def _is_shown(child: ast.stmt) -> bool:
    public = isinstance(child, ast.FunctionDef) and not child.name.startswith("_")
    return public and bool(ast.get_docstring(child))  # type: ignore[arg-type]


def _method(node: ast.stmt) -> str:
    assert isinstance(node, ast.FunctionDef)
    summary = _split(ast.get_docstring(node) or "")[0]
    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    name = node.name if is_property else _signature(node, node.name)
    return f"- `{name}`: {_text(summary)}"


def _signature(node: Documented, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        return name
    arguments = [a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
    names = [a.arg for a in arguments] + [f"{a.arg}=" for a in node.args.kwonlyargs]
    names += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return f"{name}({', '.join(names)})"


def _find(module: str, name: str) -> Documented:
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())
    for node in tree.body:
        if isinstance(node, Documented) and node.name == name:
            return node
    raise LookupError(f"{PAGE.name} names {module}.{name}, which is not there")


def _split(docstring: str) -> list[Any]:
    """What a docstring says first, and each of its fields: kind, name, text."""
    found = list(_FIELD.finditer(docstring))
    ends = [*(match.start() for match in found[1:]), len(docstring)][: len(found)]
    fields = [(m[1], m[2], docstring[m.end() : end]) for m, end in zip(found, ends, strict=True)]
    return [docstring[: found[0].start()] if found else docstring, *fields]


def _text(text: str, paragraphs: bool = False) -> str:
    text = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", inspect.cleandoc(text)).replace(
        "``", "`"
    )
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    return ("\n\n" if paragraphs else " ").join(part for part in parts if part)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
