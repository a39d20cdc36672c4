"""What a run prints, for the log of the Airflow task that follows it: line by line, as it comes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from saturn_airflow.model.printable import printable

#: No more than so much of it, in bytes; then only the last lines, when the run has ended.
MOST = 256 * 1024
LAST_LINES = 20
#: Seconds between looks at a progress bar, of which each state overwrites the one before.
BAR_SECONDS = 10.0
_LONGEST, _CHUNK = 2000, 1 << 20


class OutputReader:
    """Reads a run's output on from where the last who did had come to.

    :param output: the file with all that the run's processes print.
    :param tell: called with each line.
    """

    def __init__(self, output: Path, tell: Callable[[str], object]) -> None:
        self._output = output
        self._note = output.with_name("printed")
        self._tell = tell
        self._rest = b""
        self._left = MOST
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._bar_at = time.monotonic()
        self._offset = 0
        with contextlib.suppress(OSError, ValueError):
            told = int(self._note.read_text())
            # A damaged note must not keep back what is printed from now on.
            self._offset = told if 0 <= told <= self._output.stat().st_size else 0

    def look(self) -> None:
        """Tell each line that has come since the last look; of a progress bar, now and again, its state."""
        while self._read():
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._say(line)
            if b"\r" in self._rest:
                self._look_at_bar()
            elif len(self._rest) > _CHUNK:
                self._say(self._rest)
                self._rest = b""
            with contextlib.suppress(OSError):
                self._note.write_text(str(self._offset - len(self._rest)))

    def close(self) -> None:
        """Tell what is left, now that the run has ended."""
        self.look()
        self._say(self._rest)
        self._rest = b""
        if self._left <= 0 and self._last:
            self._tell(f"It printed more; its last lines, of {self._output}:")
            for line in self._last:
                self._tell(line)
        with contextlib.suppress(OSError):
            self._note.write_text(str(self._offset))

    def _read(self) -> bool:
        with contextlib.suppress(OSError):
            size = self._output.stat().st_size
            if size < self._offset:  # it had become too large, and was begun anew
                self._offset, self._rest = 0, b""
            if size == self._offset:
                return False
            with open(self._output, "rb") as file:
                file.seek(self._offset)
                found = file.read(_CHUNK)
            self._offset += len(found)
            self._rest += found
            return bool(found)
        return False

    def _look_at_bar(self) -> None:
        bar = self._rest.rstrip(b"\r").rpartition(b"\r")[2]
        if time.monotonic() - self._bar_at >= BAR_SECONDS:
            self._bar_at = time.monotonic()
            self._say(bar)
        self._rest = b"\r" + bar

    def _say(self, line: bytes) -> None:
        states = [printable(state).rstrip() for state in line.decode(errors="replace").split("\r")]
        text = next(filter(None, reversed(states)), "")
        if not text:
            return
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        if self._left <= 0:
            self._last.append(text)
            return
        self._left -= len(text)
        self._tell(text)
        if self._left <= 0:
            self._tell(f"That was the first {MOST // 1024} KiB; all it prints is in {self._output}")
