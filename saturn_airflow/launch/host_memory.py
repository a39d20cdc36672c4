"""How much of its machine's memory a run uses, and when that is too much for the node to stay up."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from saturn_airflow.model import sizes
from saturn_airflow.model.node_memory import KEPT_FREE

SETTING = "[saturn] job_memory"
DEFAULT = "0.9"
#: As the machine's memory runs out, runs that use more than their share end, from when less than this part of
#: it is left: the further beyond its share, the sooner.
_RESERVE = KEPT_FREE
# Looking may take this part of the time; the second, where memory is half used up.
_CALM, _ALERT = 0.01, 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Looks at what a run uses, as often as it is worth it.

    :param pids: the processes of the run.
    :param allowed: what it may use: an amount, or a part of the machine's (the container's) memory; ``"0"``
        for all it wants.
    :param share: the part of the node's devices that it has.
    :raises InvalidSweepError: when ``allowed`` is no amount.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], allowed: str, share: float) -> None:
        self._pids = pids
        self._allowed = allowed
        self._total = total()
        self._limit = sizes.bytes_of(allowed, SETTING, self._total)
        self._share = share * self._total
        self._next = 0.0
        self._used: float | None = None
        #: Whether it ended for others, who use the machine's memory, too.
        self.crowded = False

    def look(self) -> str | None:
        """Why the run has to end, None while it may go on. Costs nothing where it is not yet time to look."""
        now = time.monotonic()
        if not self._limit or now < self._next:
            return None
        left = available()
        # What is shared counts for each here: an upper bound, and cheap. What comes near is counted exactly.
        pids = list(self._pids())
        used = sum(map(_resident, pids))
        near = min(self._limit, self._share if left < _RESERVE * self._total else self._limit)
        if used > near:
            used = sum(map(_proportional, pids))
        self._used = used
        hurry = used > self._limit / 2 or left < self._total / 4
        took = time.monotonic() - now
        self._next = now + max(0.2 if hurry else 0.5, took / (_ALERT if hurry else _CALM))
        if used > self._limit:
            return self._too_much(used)
        if used > self._share and left < _RESERVE * self._total * (1 - self._share / used):
            self.crowded = True
            return self._too_crowded(used, left)
        return None

    @property
    def modest(self) -> str:
        """That the run used no more than its part of the memory, in words, when it was looked at last; empty
        where it used more, or nobody looked."""
        if self._used is None or self._used > self._share:
            return ""
        return (
            f"the job's processes used {sizes.shown(self._used)} of host memory when they were looked at, "
            f"no more than their devices' part of {sizes.shown(self._share)}: others may have filled it"
        )

    def _too_much(self, used: float) -> str:
        is_part = sizes.parse(self._allowed, SETTING)[1]
        of = f" of {sizes.shown(self._total)}" if is_part else ""
        return (
            f"the job's processes used {sizes.shown(used)} of host memory together, and may have "
            f"{sizes.shown(self._limit)} ({SETTING} is {self._allowed}{of}): hold less of the data in "
            f"memory, take fewer DataLoader workers, or raise the setting on this node"
        )

    def _too_crowded(self, used: float, left: float) -> str:
        return (
            f"this machine has {sizes.shown(left)} of its {sizes.shown(self._total)} of memory left, and the "
            f"job's processes used {sizes.shown(used)}, more than the {sizes.shown(self._share)} that are "
            "its devices' part: hold less of the data in memory, take fewer DataLoader workers, or give it "
            "more of the node's devices"
        )


def total() -> float:
    """The memory that processes of this machine, or of this container, can have at all, in bytes."""
    return min(limits().values())


def limits() -> dict[str, float]:
    """The bytes that all processes under each limit of memory can have together, by what tells the limit from
    others: this machine's, and those of this process's control groups."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # The number of a group's folder is that of the group, whatever its path is in a container.
    groups = {f"{machine}/{folder.stat().st_ino}": most for folder, most, _ in _groups()}
    return {machine: _meminfo("MemTotal"), **groups}


def available() -> float:
    """What of :func:`total` can still be taken, in bytes."""
    return min([_meminfo("MemAvailable"), *(max(0.0, most - used) for _, most, used in _groups())])


def kernel_kills() -> int:
    """How many processes the kernel has killed for want of memory, as far as can be seen from here."""
    kills = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    kills += int(line.split()[1])
    return kills


def _meminfo(name: str) -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024.0
    return float("inf")


def _groups(root: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[Path, float, float]]:
    """The folder, the limit and the use, in bytes, of each control group of this process that has a limit of
    memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, names = root, ("memory.max", "memory.current")
        if controllers:
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group = base / path.lstrip("/")
        # In a container the path may be that outside of it, and what counts is at the root.
        for folder in (group, *group.parents):
            if folder == root.parent or not folder.is_relative_to(base):
                break
            with contextlib.suppress(OSError, ValueError):
                most, used = (float((folder / name).read_text()) for name in names)
                if most < 2**62:
                    yield folder, most, used - _cached(folder)


def _cached(group: Path) -> float:
    """What a group's use counts, though the kernel gives it back when memory is wanted."""
    for line in (group / "memory.stat").read_text().splitlines():
        name, _, count = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return float(count)
    return 0.0


def _resident(pid: int) -> int:
    """Resident memory in bytes; that of others which it shares counts as its own."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    """Resident memory in bytes; what it shares with others counts in part (PSS)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)
