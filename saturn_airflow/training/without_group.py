"""Running a job's code as in a program of one process, where ranks are several."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d

_initialized = distributed_c10d.is_initialized


class _OfThread(threading.local):
    hidden = False


_thread = _OfThread()


def _is_initialized() -> bool:
    """Whether the default process group is there, and this thread may see it."""
    return not _thread.hidden and _initialized()


@contextmanager
def without_group() -> Iterator[None]:
    """Hide the process group from this thread: ``torch.distributed.is_initialized()`` is False in it.

    Models and losses that put something of all ranks together where there are several (a logged value,
    statistics, a queue) would wait for ranks that do not run them, and data would share out samples that the
    loop shares out. Checkpoints are written in another thread, which goes on talking to the other ranks.
    Inside, exchanges have to name their group (``group=dist.group.WORLD``).
    """
    # Not put back: functions that torch has compiled hold only as long as it is the same one.
    dist.is_initialized = distributed_c10d.is_initialized = _is_initialized
    before, _thread.hidden = _thread.hidden, True
    try:
        yield
    finally:
        _thread.hidden = before
