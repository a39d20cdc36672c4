"""Compiled code that was kept and can't be read any more is compiled again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = """
from typing import NamedTuple
from saturn_airflow.planning.compiled import compiled

class {name}(NamedTuple):
    x: int

@compiled
def double(pair):
    return 2 * pair.x

if __name__ == "__main__":
    import kernel
    print(kernel.double(kernel.{name}(21)), len(kernel.double.stats.cache_hits))
"""


def run(folder: Path, name: str = "Pair") -> str:
    (folder / "kernel.py").write_text(SOURCE.format(name=name))
    # numba takes code for unchanged that has the same time and size.
    os.utime(folder / "kernel.py", (1e9, 1e9))
    # Python, too, takes it for unchanged, and would run the bytecode that it kept.
    own = {"NUMBA_CACHE_DIR": str(folder / "kept"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **own}
    done = subprocess.run(
        [sys.executable, "kernel.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    assert run(tmp_path) == "42 0"
    assert run(tmp_path) == "42 1"


@pytest.mark.parametrize("how", ["renamed", "torn"])
def test_what_can_not_be_read_is_compiled_again(how: str, tmp_path: Path) -> None:
    run(tmp_path)
    if how == "torn":
        (index,) = (tmp_path / "kept").rglob("*.nbi")
        index.write_bytes(index.read_bytes()[:-20])
    assert run(tmp_path, "Twin" if how == "renamed" else "Pair") == "42 0"
