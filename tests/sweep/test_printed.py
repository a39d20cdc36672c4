"""What a run prints reaches the task's log: line by line, progress bars collapsed, no more than so much."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from saturn_airflow.launch import output_limit
from saturn_airflow.launch.output_limit import OutputLimit
from saturn_airflow.operators import printed
from saturn_airflow.operators.printed import OutputReader


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output.log"


def reader(output: Path) -> tuple[OutputReader, list[str]]:
    said: list[str] = []
    return OutputReader(output, said.append), said


def write(output: Path, text: str) -> None:
    with open(output, "a", newline="") as file:
        file.write(text)


def test_lines_come_when_they_are_whole(output: Path) -> None:
    found, said = reader(output)
    found.look()
    write(output, "one\ntw")
    found.look()
    assert said == ["one"]
    write(output, "o\n\n   \nthree")
    found.look()
    assert said == ["one", "two"]
    found.close()
    assert said == ["one", "two", "three"]


def test_who_follows_next_reads_on(output: Path) -> None:
    write(output, "one\ntw")
    first, _ = reader(output)
    first.look()
    write(output, "o\nthree\n")
    second, said = reader(output)
    second.close()
    assert said == ["two", "three"]
    third, said = reader(output)
    third.close()
    assert said == []


def test_of_a_progress_bar_its_last_state_is_said(output: Path) -> None:
    found, said = reader(output)
    for percent in range(101):
        write(output, f"\r{percent}%|####|")
        found.look()
    assert said == []
    write(output, "\nnext\n")
    found.look()
    assert said == ["100%|####|", "next"]


def test_a_long_progress_bar_is_said_now_and_then(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found, said = reader(output)
    for second in range(25):
        now[0] = float(second)
        write(output, f"\r{second} of 25")
        found.look()
    assert said == ["10 of 25", "20 of 25"]


def test_what_is_too_much_is_left_to_the_file_but_for_its_last_lines(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printed, "MOST", 2048)
    found, said = reader(output)
    for number in range(1000):
        write(output, f"line {number:4} of them\n")
    found.look()
    assert said[-1].endswith(f"all it prints is in {output}")
    assert len("".join(said)) < 2048 + 200
    before = len(said)
    found.close()
    assert str(output) in said[before]
    assert said[before + 1 :] == [f"line {number:4} of them" for number in range(980, 1000)]


def test_colours_and_endless_lines_are_cut(output: Path) -> None:
    found, said = reader(output)
    write(output, "\x1b[31mred\x1b[0m\n" + "x" * 5000 + "\n")
    found.look()
    assert said == ["red", "x" * 2000 + "..."]


def test_bytes_that_are_no_text_and_a_missing_file_stop_nothing(output: Path) -> None:
    found, said = reader(output)
    found.close()
    output.write_bytes(b"\xff\xfe\n")
    found.look()
    assert len(said) == 1


def test_what_a_job_prints_without_end_fills_no_disk(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_limit, "MOST", 1000)
    limit, (found, said) = OutputLimit(output), reader(output)
    told = []
    with open(output, "ab", buffering=0) as job:  # which has the file open all the time
        for number in range(100):
            job.write(f"line {number:04d} {'x' * 89}\n".encode())
            told.append(limit.look())
            found.look()
    assert [message for message in told if message] == [told[9]]
    assert "the job has printed 1 kB, which" in str(told[9])
    kept = (output.with_name("output-earlier.log").read_text() + output.read_text()).splitlines()
    assert [line[:9] for line in kept] == [f"line {number:04d}" for number in range(90, 100)]
    assert [line[:9] for line in said] == [f"line {number:04d}" for number in range(100) if number % 10 != 9]
