"""Random numbers in compiled code, the same ones for the same seed: xorshift64* (Vigna, 2016)."""

from __future__ import annotations

import random

import numpy as np

from saturn_airflow.planning.compiled import compiled
from saturn_airflow.planning.instances.arrays import Words


def seeded(rng: random.Random) -> Words:
    """A (1,) state to draw from, itself drawn from ``rng``; never 0, which xorshift does not leave again."""
    return np.array([rng.getrandbits(63) | 1], dtype=np.uint64)


@compiled
def draw(state: Words) -> float:
    """A random number from 0 to below 1."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    # The upper 53 of 64 bits, as many as a float holds, over 2^53.
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0
