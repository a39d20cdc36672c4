"""What others wrote is shown as text: no log entry is forged by it, and no terminal obeys it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from saturn_airflow.commands import command_line
from saturn_airflow.launch.failures import Failure
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.printable import one_line, printable, without_login
from saturn_airflow.model.problem import PlannedJob
from saturn_airflow.model.status import Status
from saturn_airflow.operators.progress_in_log import ProgressLog

#: Clears the screen; sets the clipboard and the title; goes back in the line; text by another's control set.
COMMANDS = (
    "\x1b[2J",
    "\x1b[1;31m",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x1b]0;title\x1b\\",
    "\x9b2J",
    "\x9d0;title\x9c",
    "\x1bPq#0\x1b\\",
    "\x1b_x\x1b\\",
)


@pytest.mark.parametrize("command", COMMANDS, ids=ascii)
def test_commands_to_terminals_are_left_out(command: str) -> None:
    assert printable(f"before{command}after\n\tand so on") == "beforeafter\n\tand so on"


@given(st.text(st.characters() | st.sampled_from("\x1b[]\\\x07\x9b\x9c\r\n\b;m")))
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    assert not set(printable(text)) & {chr(n) for n in (*range(9), *range(11, 32), *range(127, 160))}
    assert "\n" not in one_line(text)
    assert text.isprintable() <= (printable(text) == text)
    printable(text).encode()


@pytest.mark.parametrize("opening", ["\x1b]", "\x9d", "\x1b[0;"])
def test_commands_without_an_end_take_no_longer_than_text(opening: str) -> None:
    # It would take hours if each looked for its end to the last.
    assert "x" in printable(opening * 300_000 + "\nx")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ann:secret@mlflow.example.com:5000/x", "https://mlflow.example.com:5000/x"),
        ("no answer from http://ann:se@cret@host: refused", "no answer from http://host: refused"),
        ("redis://:secret@redis:6379/0", "redis://redis:6379/0"),
        ("http://host/of@all, ann@host", "http://host/of@all, ann@host"),
        ("sqlite:////state/mlflow.db", "sqlite:////state/mlflow.db"),
    ],
)
def test_addresses_are_shown_without_the_login_in_them(text: str, shown: str) -> None:
    assert without_login(text) == shown


def test_words_of_jobs_are_one_entry_of_the_log_each() -> None:
    said: list[str] = []

    class Log:
        def warning(self, form: str, *values: object) -> None:
            said.append(form % values)

    forged = "careful\r\n[2026-11-24] INFO - Task finished\x1b[2K"
    ProgressLog(Log(), "n").tell({"event": "warning", "message": forged})
    assert said == ["careful� [2026-11-24] INFO - Task finished"]


def test_errors_of_jobs_command_no_terminal() -> None:
    failure = Failure(status=Status.FAILED, reason="\x1b]0;x\x07no", traceback="one\ntwo\x1b[2J\x08")
    assert (failure.reason, failure.traceback) == ("no", "one\ntwo�")


def test_nor_does_what_mlflow_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = command_line.console()
    console.file = io.StringIO()
    table = Table("\x1b[2Jname")
    table.add_row(Text("a\x1b]0;title\x07b", style="red"))
    table.add_row("c\x1b[31md")
    console.print(table)
    console.print("e\x9b2Jf", style="bold")
    told = console.file.getvalue()
    assert "\x1b[2J" not in told
    assert "\x1b]" not in told
    assert "\x9b" not in told
    for kept in ("name", "cd", "ef"):
        assert kept in told


def test_a_problem_file_names_nothing_with_such(tmp_path: Path) -> None:
    strategies = [{"technique": "ddp", "devices": 1, "seconds": {"cpu": 1.0}}]
    with pytest.raises(InvalidSweepError, match="may have no control characters"):
        PlannedJob.from_dict({"name": "a\x1b[2J", "strategies": strategies})
