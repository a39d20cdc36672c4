"""The tutorial's files and commands, as a newcomer types them once the first `saturn demo` has run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
#: What is done by now: it runs from an installation, and the demo is a fixture.
DONE_ELSEWHERE = ["make install", "source .venv/bin/activate", "saturn demo"]


@pytest.fixture(scope="module")
def printed(demo: Any) -> dict[str, str]:
    """What each command printed, in the folder where the demo ran, with the tutorial's files."""
    folder = demo["state"].parent
    shutil.copytree(ROOT / "dags", folder / "dags")
    for title, text in re.findall(r'^```python title="(\S+)"\n(.*?)^```', TUTORIAL, re.MULTILINE | re.DOTALL):
        (folder / title).write_text(text)
    commands = re.findall(r"^\$ (.*)$", TUTORIAL, re.MULTILINE)
    assert commands[:3] == DONE_ELSEWHERE
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SATURN")}
    exported: list[str] = []
    outputs: dict[str, str] = {}
    for command in commands[3:]:
        if command.startswith("export "):
            exported.append(command)
            continue
        # Saturn's own examples are its default, which an installation has elsewhere.
        demo_here = command.replace("--dag", "--dags dags --dag")
        typed = demo_here if command.startswith("saturn demo") else "\n".join([*exported, command])
        done = subprocess.run(
            ["bash", "-c", typed], cwd=folder, env={**clean, "PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        outputs[command] = done.stdout
    return outputs


def test_the_newcomers_own_jobs_train(printed: dict[str, str]) -> None:
    table = printed["saturn demo --dag my_first_sweep"].split("What the sweep did")[1]
    assert len(re.findall(r"ring-(?:16|64)-lr0\.\d+ +(?:single|ddp) +[12] ", table)) == 4


def test_the_command_line_shows_them(printed: dict[str, str]) -> None:
    assert re.search(r"nightly_retrain/\S+ +finished", printed["saturn sweeps"])
    assert printed["saturn sweeps show nightly_retrain"].count("finished") == 9
    assert printed["saturn sweeps show my_first_sweep"].count("finished") == 5
    assert "gpt2-" in printed["saturn estimates"]


def test_the_champion_answers(printed: dict[str, str]) -> None:
    assert re.search(r"\[1 0 0\]", printed["python ask.py"])
