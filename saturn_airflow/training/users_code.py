"""Telling the user's mistakes from our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from saturn_airflow.errors import JobError, SaturnError
from saturn_airflow.training.request import DoesNotFit


@contextmanager
def of_the_job(what: str) -> Iterator[None]:
    """Around calls of the job's own code, called ``what`` in messages.

    :raises JobError: from whatever it raises.
    """
    try:
        yield
    except (SaturnError, DoesNotFit):
        raise
    except Exception as error:
        raise JobError(f"{what} raised {type(error).__name__}: {error}") from error
