"""Finding single events among millions: the file is read in parts, from its end on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from saturn_airflow.launch import event_file

_KINDS = ("a", "b", "c")


def _line(kind: str, number: int, length: int) -> str:
    return json.dumps({"event": kind, "number": number, "text": "x" * length, "time": 1.0}) + "\n"


def _naive(folder: Path) -> list[Any]:
    return [event for event, _ in event_file.read(folder) if event is not None]


@pytest.mark.parametrize("part", [1, 7, 64, 1 << 20])
def test_what_is_found_is_what_is_there_whatever_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(event_file, "_PART", part)
    rng = random.Random(part)
    for _ in range(40):
        lines = [_line(rng.choice("ab"), n, rng.randrange(60)) for n in range(rng.randrange(6))]
        odd = ("no event\n", '{"event": "a"}\n', '{"event": "a", "time": 1.0', "\n")
        lines += rng.choice([[], *([line] for line in odd)])
        (tmp_path / event_file.NAME).write_text("".join(lines))
        there = _naive(tmp_path)
        for kind in _KINDS:
            own = [event for event in there if event["event"] == kind]
            assert event_file.every(tmp_path, kind) == own
            assert event_file.last(tmp_path, kind) == (own[-1] if own else None)
        marks = [n for n, event in enumerate(there) if event["event"] == "b"]
        since = [e for e in there[marks[-1] :] if e["event"] == "a"] if marks else []
        if '{"event": "a"}\n' not in lines:
            assert event_file.first_since(tmp_path, "b", "a") == (since[0] if since else None)
    assert event_file.every(tmp_path / "nowhere", "a") == []


def test_who_cuts_the_file_short_ends_nobody_who_reads_it(tmp_path: Path) -> None:
    """Behind a mapped file's new end is nothing: whoever looks there is ended by SIGBUS."""
    with open(tmp_path / event_file.NAME, "w") as file:
        file.write(_line("a", 1, 1 << 16) * 400)
    code = f"""
        import os, pathlib
        from saturn_airflow.launch import event_file
        folder, really = pathlib.Path({str(tmp_path)!r}), event_file._event
        def cutting(line):
            os.truncate(folder / event_file.NAME, 0)
            return really(line)
        event_file._event = cutting
        event_file.every(folder, "a")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert ended.returncode != -signal.SIGBUS
    assert ended.returncode == 0
