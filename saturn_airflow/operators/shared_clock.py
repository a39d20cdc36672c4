"""How far the clocks of machines differ, by the clock of the disk that they share."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

#: What is less may be the disk's: it tells the time of files in steps, and answers late.
_SAME_SECONDS = 1.0


def ahead_of(folder: Path) -> float | None:
    """Seconds by which this machine's clock is ahead of that by which the disk of ``folder`` tells the time
    of files; 0 where they differ by less than a second, None where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            before = time.time()
            os.utime(file.fileno())
            marked = os.fstat(file.fileno()).st_mtime
            after = time.time()
    except OSError:
        return None
    ahead = min(max(marked, before), after) - marked
    return ahead if abs(ahead) > _SAME_SECONDS else 0.0


def ahead_of_plan(folder: Path, planned_ahead: float | None) -> float:
    """Seconds by which this machine's clock is ahead of that of who planned; 0 where nobody knows.

    :param planned_ahead: what :func:`ahead_of` said there; None also where an earlier version planned.
    """
    own = None if planned_ahead is None else ahead_of(folder)
    return 0.0 if own is None or planned_ahead is None else own - planned_ahead


class PlansClock:
    """How far this machine's clock is ahead of that of who planned; asked again once somebody has set it.

    :param folder: on the disk that both share; as :func:`ahead_of_plan` takes it, like ``planned_ahead``.
    """

    def __init__(self, folder: Path | None = None, planned_ahead: float | None = None) -> None:
        self._folder, self._planned_ahead = folder, planned_ahead
        self._off, self._ahead = float("inf"), 0.0

    def ahead(self) -> float:
        """The seconds by now."""
        off = time.time() - time.monotonic()  # which nobody sets
        if self._folder is not None and abs(off - self._off) > _SAME_SECONDS:
            self._off, self._ahead = off, ahead_of_plan(self._folder, self._planned_ahead)
        return self._ahead
