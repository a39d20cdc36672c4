"""Where a process's number means that process: others have the same numbers on other machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def name() -> str:
    """What no machine, or container, has that has other processes: hosts may be called alike."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def is_meant(told: str) -> bool:
    """Whether :func:`name` was ``told`` here, or, by an earlier version, this host's name."""
    return told in (name(), socket.gethostname())
