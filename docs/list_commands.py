"""Write the arguments of every command into docs/cli.md: ``python docs/list_commands.py``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from saturn_airflow.cli import COMMANDS, parser_of

PAGE = Path(__file__).with_name("cli.md")
_PART = re.compile(r"(<!-- commands -->\n).*(?=<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """``page`` with what the parsers say."""
    commands = _actions_of(parser_of(list(COMMANDS)))
    return _PART.sub(lambda found: found[1] + "".join(map(_entry, commands)), page)


def _actions_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of its commands."""
    found = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [inner for choices in found for inner in choices.values()]


def _entry(parser: argparse.ArgumentParser) -> str:
    """A command: what it does, its arguments, and its actions where they take others."""
    rows = _rows(parser)
    parts = [f"### `{parser.prog}`", " ".join((parser.description or "").split())]
    parts.append("\n".join(["| argument | what |", "| --- | --- |", *rows]) if rows else "")
    text = "".join(f"{part}\n\n" for part in parts if part)
    return text + "".join(_entry(inner) for inner in _actions_of(parser) if _rows(inner) != rows)


def _rows(parser: argparse.ArgumentParser) -> list[str]:
    apart = argparse._HelpAction | argparse._SubParsersAction
    return [_row(action) for action in parser._actions if not isinstance(action, apart)]


def _row(action: argparse.Action) -> str:
    value = str(action.metavar or action.dest)
    if action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    elif action.option_strings:
        value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    several = " ..." if action.nargs in ("*", "+") else ""
    names = ", ".join(f"{name} {value}".strip() for name in action.option_strings) or value
    said = argparse.HelpFormatter("saturn")._expand_help(action)
    return f"| `{names}{several}` | {said.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
