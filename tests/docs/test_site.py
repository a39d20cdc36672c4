"""The documentation: it builds, its links lead somewhere, and what it says of the command line is so."""

from __future__ import annotations

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_says_a_line_twice(page: Path) -> None:
    lines = Counter(line for line in _CODE.sub("", page.read_text()).splitlines() if len(line) > 90)
    assert [line for line, times in lines.items() if times > 1 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_saturn_commands_are_ones_it_takes(page: Path) -> None:
    for line in re.findall(r"^\$ (saturn .*)$", page.read_text(), re.MULTILINE):
        words = shlex.split(line.partition("|")[0], comments=True)[1:]
        assert parser_of(words[:1]).parse_args(words)
