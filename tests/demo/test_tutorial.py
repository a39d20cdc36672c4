"""The tutorial's files and commands, as a newcomer types them. Its `saturn demo` is what test_demo runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
#: What a test can't do again: it runs from an installation, and the long demo has a test of its own.
DONE_ELSEWHERE = ["make install", "source .venv/bin/activate", "saturn demo"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command printed, in a folder with the tutorial's files."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "dags", clone / "dags")
    for title, text in re.findall(r'^```python title="(\S+)"\n(.*?)^```', TUTORIAL, re.MULTILINE | re.DOTALL):
        (clone / title).write_text(text)
    commands = re.findall(r"^\$ (.*)$", TUTORIAL, re.MULTILINE)
    assert commands[:3] == DONE_ELSEWHERE
    sweep = commands.index("saturn demo --dag my_first_sweep")
    # Sweeps are looked at once there is one; the variable holds for all that follow.
    export = next(command for command in commands if command.startswith("export "))
    order = [*commands[sweep : sweep + 1], *commands[3:sweep], *commands[sweep + 1 :]]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outputs: dict[str, str] = {}
    for command in order:
        if command == export:
            continue
        typed = command.replace("nightly_retrain", "my_first_sweep").replace("--dag", "--dags dags --dag")
        done = subprocess.run(
            ["bash", "-c", typed if command.startswith("saturn demo") else f"{export}\n{typed}"],
            cwd=clone,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        outputs[command] = done.stdout
    return outputs


def test_the_newcomers_own_jobs_train(printed: dict[str, str]) -> None:
    table = printed["saturn demo --dag my_first_sweep"].split("What the sweep did")[1]
    assert len(re.findall(r"ring-(?:16|64)-lr0\.\d+ +(?:single|ddp) +[12] ", table)) == 4


def test_the_command_line_shows_them(printed: dict[str, str]) -> None:
    assert re.search(r"my_first_sweep/\S+ +finished", printed["saturn sweeps"])
    assert printed["saturn sweeps show my_first_sweep"].count("finished") == 5
    assert "ring-" in printed["saturn estimates"]


def test_the_champion_answers(printed: dict[str, str]) -> None:
    assert re.search(r"\[1 0 0\]", printed["python ask.py"])
