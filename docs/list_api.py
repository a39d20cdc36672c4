"""Write the reference of the Python API from its docstrings: ``python docs/list_api.py``.

Each name stands in docs/reference.md between two comments, with its summary and a table of its parameters and
their defaults. Of a class all public methods follow, or those that the comment names behind ``methods:``.
Nothing of the package is imported.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference.md"
_PART = re.compile(r"<!-- api: (\S+)(?: methods:([\w ]*))? -->\n.*?<!-- end -->", re.DOTALL)
_FIELD = re.compile(r"^:(param|returns|raises|ivar) ?([^:]*):", re.MULTILINE)
#: What needs no module of its own to be imported from.
_AT_THE_TOP = (ROOT / "saturn_airflow" / "__init__.py").read_text().partition("__all__")[2]
_ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):`~?\.*([^`]*)`")

Documented = ast.ClassDef | ast.FunctionDef


def written(page: str) -> str:
    """``page`` with what the docstrings say."""

    def part(found: re.Match[str]) -> str:
        methods = None if found[2] is None else found[2].split()
        return f"{found[0].partition(chr(10))[0]}\n{_entry(found[1], methods)}<!-- end -->"

    return _PART.sub(part, page)


def _entry(dotted: str, methods: Sequence[str] | None) -> str:
    """What stands between the comments; of all methods where ``methods`` is None."""
    module, _, name = dotted.rpartition(".")
    node = _find(module, name)
    docstring = ast.get_docstring(node) or ""
    summary, *fields = _split(docstring)
    parts = [f"### `{_signature(node, name, module)}`", _text(summary, paragraphs=True)]
    if f'"{name}"' not in _AT_THE_TOP:
        parts.insert(1, f"`from {module} import {name}`")
    if rows := [(name, text) for kind, name, text in fields if kind in ("param", "ivar")]:
        parts.append(_table(rows, _defaults(node, module)))
    for kind, name, text in fields:
        if kind in ("returns", "raises"):
            parts.append(f"*{kind.capitalize()}* {f'`{name}` ' if name else ''}{_text(text)}")
    if isinstance(node, ast.ClassDef):
        shown = [child for child in node.body if _is_shown(child)]
        parts += [_method(child, module) for child in shown if methods is None or child.name in methods]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[tuple[str, str]], defaults: dict[str, str]) -> str:
    """A row for each parameter; a column of defaults where any has one."""
    with_defaults = any(name in defaults for name, _ in rows)
    lines = ["| argument | default | what |", "| --- | --- | --- |"]
    if not with_defaults:
        lines = ["| argument | what |", "| --- | --- |"]
    for name, text in rows:
        default = f"`{defaults[name]}`" if name in defaults else ""
        said = _text(text).replace("|", chr(92) + "|")
        lines.append(f"| `{name}` | {default} | {said} |" if with_defaults else f"| `{name}` | {said} |")
    return "\n".join(lines)


def _defaults(node: Documented, module: str) -> dict[str, str]:
    """The defaults of what a function, or what makes an object of a class, is called with, as code."""
    made = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
    if isinstance(node, ast.ClassDef) and not made:
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign) and child.value]
        return {ast.unparse(child.target): _value(child.value, module) for child in fields if child.value}
    arguments = (made[0] if isinstance(node, ast.ClassDef) else node).args
    positional = [*arguments.posonlyargs, *arguments.args]
    found = dict(zip(reversed([a.arg for a in positional]), reversed(arguments.defaults), strict=False))
    found |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
    return {name: _value(value, module) for name, value in found.items()}


def _value(value: ast.expr, module: str) -> str:
    """A default as code that says what it is: no name of a constant, no factory."""
    match value:
        case ast.Call(func=ast.Name(id="field"), keywords=[ast.keyword(arg="default_factory", value=made)]):
            code = ast.unparse(made.body if isinstance(made, ast.Lambda) else made)
            return {"dict": "{}", "list": "[]"}.get(
                code, code if isinstance(made, ast.Lambda) else f"{code}()"
            )
        case ast.Name(id=name):
            return _constant(module, name)
        case ast.Attribute(value=ast.Name(id=base), attr=name):
            return _constant(_imports(module)[base], name)
    return ast.unparse(value).replace("'", '"')


def _constant(module: str, name: str) -> str:
    """What a constant of a module is, wherever that has it from."""
    for node in _tree(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return _value(value, module)
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                return _value(value, module)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=True):
                    if isinstance(target, ast.Name) and target.id == name:
                        return _value(value, module)
    return _constant(_imports(module)[name].rpartition(".")[0], name)


def _imports(module: str) -> dict[str, str]:
    """What a module imports by name, and from where."""
    froms = [node for node in _tree(module).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}" for node in froms for alias in node.names
    }


def _tree(module: str) -> ast.Module:
    return ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())


def _is_shown(child: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    public = isinstance(child, ast.FunctionDef) and not child.name.startswith("_")
    return public and bool(ast.get_docstring(child))  # type: ignore[arg-type]


def _method(node: ast.FunctionDef, module: str) -> str:
    summary, *fields = _split(ast.get_docstring(node) or "")
    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    name = node.name if is_property else _signature(node, node.name, module)
    said = [_text(summary)]
    said += [f"`{what}`: {_text(text)}" for kind, what, text in fields if kind == "param"]
    said += [
        f"*{kind.capitalize()}* {f'`{_text(what)}` ' if what else ''}{_text(text)}"
        for kind, what, text in fields
        if kind != "param"
    ]
    return f"- `{name}`: " + " ".join(part if part.endswith(".") else f"{part}." for part in said if part)


def _signature(node: Documented, name: str, module: str) -> str:
    if isinstance(node, ast.ClassDef):
        return name
    defaults = _defaults(node, module)
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
    names = [f"{a}={defaults[a]}" if a in defaults else a for a in arguments]
    names += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    names += [f"{a.arg}={defaults.get(a.arg, '')}" for a in node.args.kwonlyargs]
    names += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return f"{name}({', '.join(names)})"


def _find(module: str, name: str) -> Documented:
    for node in _tree(module).body:
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
