"""How many samples the guard's steps are taken on."""

from __future__ import annotations


def numbers_of_samples(devices: int, accumulate: int) -> tuple[int, int]:
    """Of batches that each device has some of, not all as much, and of those that one has nothing of."""
    return max(2 * devices - 1, accumulate + 1, 3), max(1, devices - 1)
