"""Random numbers in compiled code, the same ones for the same seed: xorshift64* (Vigna, 2016)."""

from __future__ import annotations

import random

import numpy as np

from saturn_airflow.planning.compiled import compiled
from saturn_airflow.planning.instances.arrays import Words


def seeded(rng: random.Random) -> Words:
    """A state to draw from, itself drawn from ``rng``."""
    return np.array([rng.getrandbits(63) | 1], dtype=np.uint64)


@compiled
def draw(state: Words) -> float:
    """A random number from 0 to below 1."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(0x2545F4914F6CDD1D)) >> np.uint64(11)) / 9007199254740992.0
