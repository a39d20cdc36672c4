"""How long the cores of this machine have worked, as the kernel counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple


class Worked(NamedTuple):
    """What the cores that this process may use have done by now.

    :param machine: which machine this is, until it is started anew: the same in all of its containers.
    :param at: seconds on the machine's own clock.
    :param cores: their numbers.
    :param seconds: that they have worked since then, all together.
    """

    machine: str
    at: float
    cores: tuple[int, ...]
    seconds: float


def worked() -> Worked | None:
    """Look; None where the kernel does not say."""
    try:
        return _worked()
    except (OSError, ValueError, IndexError):
        return None


def _worked() -> Worked:
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    names, ticks = {f"cpu{core}" for core in cores}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in names:
            # user, nice, system; then idle and waiting; then interrupts (proc_stat(5)).
            ticks += sum(int(counts[field]) for field in (0, 1, 2, 5, 6))
    return Worked(machine, time.monotonic(), cores, ticks / os.sysconf("SC_CLK_TCK"))
