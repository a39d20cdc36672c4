"""Running a job's code as in a program of one process, where ranks are several."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What the environment says of a rank, as under torchrun."""


@contextmanager
def without_group() -> Iterator[None]:
    """Hide the process group from this thread: ``torch.distributed.is_initialized()`` is False in it.

    Models and losses that put something of all ranks together where there are several (a logged value,
    statistics, a queue) would wait for ranks that do not run them, and data would share out samples that the
    loop shares out. Checkpoints are written in another thread, which goes on talking to the other ranks.
    """
    here, initialized = threading.get_ident(), distributed_c10d.is_initialized

    def hidden() -> bool:
        return threading.get_ident() != here and initialized()

    dist.is_initialized = distributed_c10d.is_initialized = hidden
    try:
        yield
    finally:
        dist.is_initialized = distributed_c10d.is_initialized = initialized


@contextmanager
def loading_alone() -> Iterator[None]:
    """Hide the process group from this thread, and the ranks' numbers in the environment from everybody.

    Accelerate, and with it the Trainer of transformers, makes a process group of its own where the
    environment has ``LOCAL_RANK`` and no group is to be seen.
    """
    numbers = {name: os.environ.pop(name) for name in NUMBERS if name in os.environ}
    try:
        with without_group():
            yield
    finally:
        os.environ.update(numbers)
