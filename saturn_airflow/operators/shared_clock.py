"""How far the clocks of machines differ, by the clock of the disk that they share."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

#: What is less may be the disk's: it tells the time of files in steps, and answers late.
_SAME_SECONDS = 1.0


def ahead_of(folder: Path) -> float:
    """Seconds by which this machine's clock is ahead of that by which the disk of ``folder`` tells the time
    of files; 0 where they differ by less than a second, and where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            before = time.time()
            os.utime(file.fileno())
            marked = os.fstat(file.fileno()).st_mtime
            after = time.time()
    except OSError:
        return 0.0
    ahead = min(max(marked, before), after) - marked
    return ahead if abs(ahead) > _SAME_SECONDS else 0.0
