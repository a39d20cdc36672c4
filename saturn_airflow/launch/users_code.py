"""Telling the user's mistakes from our own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from saturn_airflow.launch.failures import exits, said
from saturn_airflow.launch.forked import in_one_process
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.errors import JobError, SaturnError

Item = TypeVar("Item")


@contextmanager
def of_the_job(what: str) -> Iterator[None]:
    """Around calls of the job's own code, called ``what`` in messages.

    :raises JobError: from whatever it raises.
    """
    try:
        with in_one_process():
            yield
    except (SaturnError, DoesNotFit):
        raise
    except Exception as error:
        raise JobError(f"{what} raised {type(error).__name__}: {said(error)}") from error
    except SystemExit as error:
        raise JobError(f"{what} {exits(error)}") from error


def each_of_the_job(what: str, items: Iterator[Item]) -> Iterator[Item]:
    """What the job's own data gives, one after the other; data know nothing of the optimizer.

    :raises JobError: from whatever they raise.
    """
    while True:
        with common_to_alike(), of_the_job(what):
            item = next(items, None)
        if item is None:
            return
        yield item


@contextmanager
def common_to_alike(holds: bool = True) -> Iterator[None]:
    """Around what knows nothing of the optimizer, its arguments and its schedule yet: mark errors as common.

    Jobs that differ in nothing else would all meet them
    (:attr:`~saturn_airflow.model.errors.SaturnError.common`).
    """
    try:
        yield
    except SaturnError as error:
        error.common = error.common or holds
        raise
