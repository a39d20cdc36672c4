"""What counts as a number where data say one: True and False do not, though Python takes them for 1 and 0."""

from __future__ import annotations

from typing import TypeGuard


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an int or a float, NaN and infinity among them, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
