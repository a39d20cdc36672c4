"""Where modules are: the page that lists them, and their old names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import saturn_airflow
from saturn_airflow.moved import _names

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))


def test_the_page_lists_every_file() -> None:
    import list_files

    assert list_files.PAGE.read_text() == list_files.page(), "run: python docs/list_files.py"


def test_the_reference_says_what_docstrings_say() -> None:
    import list_api

    page = list_api.PAGE.read_text()
    assert page == list_api.written(page), "run: python docs/list_api.py"


def test_the_page_of_commands_lists_every_argument() -> None:
    import list_commands

    page = list_commands.PAGE.read_text()
    assert page == list_commands.written(page), "run: python docs/list_commands.py"


def test_no_name_of_a_file_or_a_class_means_two_things() -> None:
    """Files of ``commands`` have the names of the commands, whatever else these are names of."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "saturn_airflow").rglob("*.py")):
        where = str(path.relative_to(ROOT))
        if path.name != "__init__.py" and path.parent.name != "commands":
            places[path.name].append(where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(where)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize(("old", "new"), sorted(_names().items()))
def test_an_old_name_is_the_module_itself(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__spec__ is not None
    assert (found.__name__, found.__spec__.name) == (new, new)


def test_an_old_module_has_what_is_in_another_now() -> None:
    sys.modules.pop("saturn_airflow.jobs", None)
    with pytest.warns(DeprecationWarning, match=r"saturn_airflow\.jobs is now"):
        assert importlib.import_module("saturn_airflow.jobs").grid is saturn_airflow.grid


def test_an_old_name_can_be_run() -> None:
    """As a service does that was started before the upgrade."""
    command = [sys.executable, "-m", "saturn_airflow.launch.fork_server"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "sys.argv[1]" in ended.stderr


@pytest.mark.slow
def test_new_names_warn_of_nothing() -> None:
    modules = ("planning.planner", "operators.sweep", "training.loop", "launch.runs")
    code = "import " + ", ".join(f"saturn_airflow.{module}" for module in modules)
    ended = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    assert (ended.returncode, "its old name" in ended.stderr) == (0, False)
