"""Errors of a job that are told in odd ways: messages as long as its data, none at all, no Exceptions."""

from __future__ import annotations

import asyncio

import pytest

from saturn_airflow.launch import failures, users_code
from saturn_airflow.model.errors import JobError


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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            asyncio.CancelledError("the loader"),
            "the job's code raised CancelledError: the loader; let it raise",
        ),
        (GeneratorExit(), "the job's code raised GeneratorExit; let it raise"),
        (KeyboardInterrupt(), "the job's code raised KeyboardInterrupt (or somebody sent it SIGINT); let it"),
        (SystemExit(3), "the job's code called sys.exit(3); "),
    ],
)
def test_what_is_no_exception_is_of_the_jobs_code(error: BaseException, said: str) -> None:
    failure = failures.describe(error)
    assert (failure.status, failure.whose) == ("failed", "job")
    assert failure.reason.startswith(said)


class UnsayableError(RuntimeError):
    def __str__(self) -> str:
        raise KeyError(self)


def test_an_error_that_can_not_be_turned_into_text_is_told_by_its_class() -> None:
    """The process that was to tell of it ended without a word."""
    told = "UnsayableError: <its message can't be told: its __str__ raises>"
    assert failures.describe(UnsayableError()).reason == told
    with pytest.raises(JobError) as raised, users_code.of_the_job("the model"):
        raise UnsayableError
    failure = failures.describe(raised.value)
    assert (failure.whose, failure.reason) == (
        "job",
        told.replace("UnsayableError", "the model raised UnsayableError"),
    )
