"""A module of a job's package that its model and loss ask: it counts how often."""

from __future__ import annotations

from collections.abc import Callable

CALLS = 0


def divisor(calls: int) -> int:
    """What a loss is divided by in a call."""
    return max(1, calls - 3)


def count() -> int:
    """How often this was called."""
    global CALLS
    CALLS += 1
    return CALLS


def counter() -> Callable[[], int]:
    """A function that counts how often it was called."""
    calls = 0

    def called() -> int:
        nonlocal calls
        calls += 1
        return calls

    return called
