"""Random numbers that depend on where training stands, not on how it got there.

Every draw is seeded from a position such as (seed, step, micro-batch), so there is no generator state to
carry: the same step draws the same numbers in a run that was resumed, moved or never interrupted.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed(*position: int | str) -> None:
    """Seed Python's, numpy's and torch's generators (those of all devices too) from ``position``."""
    start = number(*position)
    random.seed(start)
    np.random.seed(start % 2**32)
    # torch.manual_seed would look for devices of all makes each time, which takes longer than many a sample.
    torch.default_generator.manual_seed(start)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(start)


def generator(*position: int | str) -> torch.Generator:
    """A torch generator of its own, on the CPU, seeded from ``position``."""
    return torch.Generator().manual_seed(number(*position))


def is_global(generator: object) -> bool:
    """Whether a generator is one that :func:`seed` seeds."""
    own = getattr(random.random, "__self__", None), np.random.mtrand._rand, torch.default_generator
    return any(generator is one for one in own)


def states_on_host() -> list[tuple[Any, int]]:
    """What decides what numpy and Python's random draw next: words, and how many of those are used up."""
    of_numpy: Any = np.random.get_state()
    _, words, used, *_ = of_numpy
    _, (*others, used_too), _ = random.getstate()
    return [(bytes(words), int(used)), (others, used_too)]


def number(*position: int | str) -> int:
    """The number that generators are seeded with for ``position``, from 0 to 2**63 - 1."""
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
