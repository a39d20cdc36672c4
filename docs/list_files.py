"""Writes the list of files in docs/architecture.md: what the first line of each says it is for."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## Every file\n"


def listed() -> str:
    """The section, from its heading to its end."""
    lines = [HEADING, "Written by `python docs/list_files.py`; a test holds it.\n"]
    package = ROOT / "saturn_airflow"
    for folder in (package, *sorted({path.parent for path in package.rglob("*.py")} - {package})):
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if files:
            lines.append(f"**{folder.relative_to(ROOT)}/** {_purpose(folder / '__init__.py')}\n")
            lines += [f"- `{path.name}`: {_purpose(path)}" for path in files]
            lines.append("")
    return "\n".join(lines)


def _purpose(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text()))
    assert said, f"{path} does not say what it is for"
    return " ".join(said.split("\n\n")[0].replace(":mod:`", "`").split())


def page() -> str:
    """The page with the list as it should be."""
    return PAGE.read_text().partition(HEADING)[0] + listed()


if __name__ == "__main__":
    PAGE.write_text(page())
