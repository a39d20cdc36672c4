"""Code of a user on a file system where each ``fsync`` takes its time."""

from __future__ import annotations

import os
import time

from small_jobs import linear
from torch import nn

_sync = os.fsync


def _slow_sync(file: int) -> None:
    time.sleep(0.1)
    _sync(file)


def model() -> nn.Module:
    os.fsync = _slow_sync  # type: ignore[assignment]
    return linear()
