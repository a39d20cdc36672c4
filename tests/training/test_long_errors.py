"""Errors of a job whose messages are as long as its data."""

from __future__ import annotations

from saturn_airflow.launch import failures


def test_a_message_of_megabytes_is_told_in_a_few_thousand_characters() -> None:
    try:
        raise ValueError("expected " + "1.25, " * 1_000_000 + "not these")
    except ValueError as error:
        failure = failures.describe(error)
    assert failure.status == "failed"
    assert len(failure.reason) < 4100
    assert failure.reason.startswith("ValueError: expected 1.25, ")
    assert failure.reason.endswith("not these")
    assert "characters ...]" in failure.reason
    assert len(failure.traceback) < 101_000
    assert "test_long_errors.py" in failure.traceback


def test_what_is_short_is_told_whole() -> None:
    message = "x" * 3000
    assert failures.describe(ValueError(message)).reason == f"ValueError: {message}"
