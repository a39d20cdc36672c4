"""The documentation: it builds, links and tables are whole, its commands and results are those there are."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from saturn_airflow.cli import parser_of

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docker/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "reference" / "index.html").read_text()
    assert "register_as" in reference
    pages = list((tmp_path / "site").rglob("*.html"))
    foreign = re.compile(r"""<(?:link|script|img)[^>]*(?:href|src)=["']?https?://""")
    assert [page for page in pages if foreign.search(page.read_text())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def anchors(page: Path) -> set[str]:
    """What a link may name behind its ``#``: the headings, as Markdown's ``toc`` and GitHub name them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        file, _, heading = target.partition("#")
        to = page.parent / file if file else page
        if heading and not re.match(r"[a-z]+:", target) and to.suffix == ".md":
            assert heading in anchors(to), target


def broken_rows(text: str) -> list[str]:
    """Lines of tables that are no whole row of them, and what interrupts tables."""
    found, columns, before = [], 0, ""
    for line in _FENCED.sub("", text).splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            if not line.endswith("|") or (columns and cells != columns) or (not columns and before):
                found.append(line)
            columns = columns or cells
        else:
            if line.endswith(" |") or (columns and line and not line.startswith("<!--")):
                found.append(line)
            columns = 0
        before = "" if line.startswith(("<!--", "#")) else line
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    assert broken_rows(page.read_text()) == []


def test_rows_that_are_not_whole_are_found() -> None:
    whole = "| a | b |\n| --- | --- |\n| 1 | `x \\| y` |\n\nText.\n"
    assert broken_rows(whole) == []
    torn = "| a | b |\n| --- | --- |\n| 1 | Half of it. \nAnother paragraph |\n| 2 | 3 |\n| 4 |\n"
    assert broken_rows(torn) == ["| 1 | Half of it. ", "Another paragraph |", "| 2 | 3 |", "| 4 |"]


@pytest.mark.parametrize("name", ["planner", "rounds", "arrivals", "promises"])
def test_tables_of_results_are_those_of_their_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    table = importlib.import_module(name).table(results["rows"] if name == "rounds" else results)
    pages = "".join(page.read_text() for page in PAGES)
    marked = re.findall(rf"<!-- {name}-results -->\n(.*?)\n<!-- /{name}-results -->", pages, re.DOTALL)
    assert marked == [table]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_says_a_line_twice(page: Path) -> None:
    lines = Counter(line for line in _CODE.sub("", page.read_text()).splitlines() if len(line) > 90)
    assert [line for line, times in lines.items() if times > 1 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_saturn_commands_are_ones_it_takes(page: Path) -> None:
    for line in re.findall(r"^\$ (saturn .*)$", page.read_text(), re.MULTILINE):
        words = shlex.split(line.partition("|")[0], comments=True)[1:]
        assert parser_of(words[:1]).parse_args(words)
