"""What is said of a launched process that ended without a word."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from saturn_airflow.launch.failures import Failure
from saturn_airflow.model.status import Status


def described(rank: int, code: int | None, kernel_killed: bool) -> Failure:
    """The failure of a process that ended without a word.

    :param code: as of ``multiprocessing.Process.exitcode``.
    :param kernel_killed: whether the kernel killed anything on this machine meanwhile for want of memory.
    """
    what = f"rank {rank}"
    if code is None or code >= 0:
        reason = f"{what} exited with code {code}: the job's code, or a library, has ended it (os._exit)"
        return Failure(status=Status.LOST, reason=reason, rank=rank)
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and kernel_killed:
        reason = (
            f"{what} was killed by the kernel because the memory of its machine, or of its container, ran out"
        )
        return Failure(status=Status.OUT_OF_MEMORY, reason=reason, rank=rank, signal=name)
    hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return Failure(status=Status.LOST, reason=f"{what} was killed by {name}{hint}", rank=rank, signal=name)


def kernel_kills() -> int:
    """How many processes the kernel has killed for want of memory, as far as can be seen from here."""
    kills = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    kills += int(line.split()[1])
    return kills
