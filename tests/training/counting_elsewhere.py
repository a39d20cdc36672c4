"""A module of a job's that its loss calls into."""

from __future__ import annotations

CALLS = 0


def count() -> int:
    """How often this was called."""
    global CALLS
    CALLS += 1
    return CALLS
