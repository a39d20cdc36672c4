"""Searching for the parameters of a technique."""

from __future__ import annotations

from collections.abc import Sequence

from saturn_airflow.library import Parameters
from saturn_airflow.training.failures import RanksFailedError
from saturn_airflow.training.request import DoesNotFit
from saturn_airflow.training.session import Session


def first_that_fits(session: Session, *tiers: Sequence[Parameters]) -> tuple[Parameters, float]:
    """The fastest parameters of the first tier of which any fit in memory, and their seconds per batch.

    A tier needs less memory than the one before it and is slower, so it is only measured where that one does
    not fit.

    :raises DoesNotFit: when none of them fits.
    """
    *easier, last = tiers
    for tier in easier:
        try:
            return session.fastest(tier)
        except DoesNotFit:
            continue
        except RanksFailedError as error:
            if error.failure.status not in ("out_of_memory", "lost"):
                raise
    return session.fastest(last)
