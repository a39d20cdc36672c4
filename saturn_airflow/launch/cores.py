"""How long the cores of this machine have worked, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Worked(NamedTuple):
    """What the cores that this process may use have done by now.

    :param at: seconds since the machine was started.
    :param cores: their numbers.
    :param seconds: that they have worked since then, all together.
    """

    at: float
    cores: tuple[int, ...]
    seconds: float


def worked() -> Worked:
    """Look.

    :raises OSError: where the kernel does not say.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    names, ticks = {f"cpu{core}" for core in cores}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in names:
            # user, nice, system; then idle and waiting; then interrupts (proc_stat(5)).
            ticks += sum(int(counts[field]) for field in (0, 1, 2, 5, 6))
    at = float(Path("/proc/uptime").read_text().split()[0])
    return Worked(at, cores, ticks / os.sysconf("SC_CLK_TCK"))


def machine() -> str:
    """Which machine this is, until it is started anew: the same in all of its containers.

    :raises OSError: where the kernel does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
