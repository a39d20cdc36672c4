"""Random generators of Python, numpy and torch: what they are, and their states."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch


@functools.cache
def is_generator_type(kind: type) -> bool:
    """Whether values of a type are random generators, of which :func:`generator_state` tells the state."""
    known = kind in (random.Random, np.random.Generator, np.random.RandomState)
    return known or issubclass(kind, torch.Generator)


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a random generator."""
    kind: type = type(value)
    return is_generator_type(kind)


def generator_state(value: Any) -> Any:
    """The state of a random generator; None of anything else."""
    if not is_generator(value):
        return None
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Give a random generator a state that :func:`generator_state` told."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
