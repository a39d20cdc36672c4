"""How long the tests take, all of them and those that there were at an earlier commit.

    make test JUNIT=results
    python benchmarks/suite.py results/*.xml --base aa7f206

Reads what pytest's --junit-xml wrote. A test counts as one of the earlier ones by the name of its function,
wherever its file has moved, with all its parameters, also those that came later; who was renamed since is
listed. Seconds are the sums of setting up, running and tearing down; where two run side by side, half
of them pass on the clock.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tests_at(commit: str) -> set[str]:
    """Names of the test functions in ``commit``."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    files = git("ls-tree", "-r", "--name-only", commit, "tests").split()
    found: set[str] = set()
    for file in files:
        if Path(file).name.startswith("test_") and file.endswith(".py"):
            found |= functions(git("show", f"{commit}:{file}"))
    return found


def functions(code: str) -> set[str]:
    """Names of the test functions in a file."""
    return {
        node.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def seconds_of(results: Iterable[Path]) -> list[tuple[str, float]]:
    """The function and the seconds of each test, as pytest's files have them."""
    return [
        (case.attrib["name"].partition("[")[0], float(case.attrib["time"]))
        for file in results
        for case in ET.parse(file).iter("testcase")
    ]


def main() -> None:
    """Print both sums, and the earlier tests that were not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="files that pytest --junit-xml wrote")
    parser.add_argument("--base", default="aa7f206", help="the earlier commit (%(default)s)")
    args = parser.parse_args()
    taken = seconds_of(args.results)
    before = tests_at(args.base)
    of_then = [(name, seconds) for name, seconds in taken if name in before]
    for what, some in (("all", taken), (f"of functions at {args.base}", of_then)):
        total = sum(seconds for _, seconds in some)
        print(f"{len(some)} tests, {what}: {total / 60:.1f} min, {total / 120:.1f} two at a time")
    gone = sorted(before - {name for name, _ in taken})
    print(f"{len(before)} functions at {args.base}, of which {len(gone)} were not run under that name:")
    print(*gone, sep="\n")


if __name__ == "__main__":
    main()
