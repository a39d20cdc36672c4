"""What MLflow has not acknowledged yet: a file of records beside the work they tell of.

Records are appended first and sent afterwards, so nothing is lost when MLflow is away or a process dies;
how far they were sent is noted after MLflow's answer, so a record may be sent twice but never skipped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from saturn_airflow.launch import file_locks
from saturn_airflow.model import json_text
from saturn_airflow.model.disks import write_whole

log = logging.getLogger(__name__)

Record = Mapping[str, Any]

FOLDER = "mlflow"
#: Its entry among the formats: the record that describes the run carries the number.
OUTBOX = "an outbox"


def now() -> int:
    """Milliseconds since the epoch, as MLflow has times."""
    return round(1000 * time.time())


class Outbox:
    """The records of one folder. Any number of processes may append; one at a time sends."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / FOLDER
        self._records = self.folder / "outbox.jsonl"
        self._state = self.folder / "sent.json"
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._unwritten = b""
        self._unsynced = False

    def append(self, *records: Record) -> None:
        """Add records. Never raises for a full disk: what can't be written is kept and tried again."""
        lines = "".join(json.dumps(record, separators=(",", ":"), default=str) + "\n" for record in records)
        with self._lock:
            self._unwritten += lines.encode()
            self._write()

    @property
    def unwritten(self) -> bool:
        """Whether records are kept in memory, because the disk is full."""
        return bool(self._unwritten)

    def sync(self) -> None:
        """Bring appended records safely to the disk."""
        with self._lock:
            self._write()
            unsynced, self._unsynced = self._unsynced, False
        # Not under the lock: appending must not wait for the disk.
        if unsynced and self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)

    def read(self, offset: int, limit: int = 5000) -> list[tuple[Record, int]]:
        """Up to ``limit`` records from byte ``offset`` on, each with the offset behind it.

        A line that a dying process left unfinished is skipped.
        """
        found: list[tuple[Record, int]] = []
        with contextlib.suppress(FileNotFoundError), self._records.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n") or len(found) == limit:
                    break
                offset += len(line)
                record = _parsed(line)
                found.append((record if record is not None else {"kind": "torn"}, offset))
        return found

    def last(self, kind: str, name: str | None, tail: int = 1 << 20) -> Record | None:
        """The last record of a kind and name among the last ``tail`` bytes."""
        with contextlib.suppress(FileNotFoundError), self._records.open("rb") as file:
            file.seek(max(0, self.size() - tail))
            for line in reversed(file.read().splitlines()):
                record = _parsed(line)
                if record is not None and record.get("kind") == kind and record.get("name") == name:
                    return record
        return None

    def moment(self) -> int:
        """Now, in milliseconds since the epoch, but after the run's last end: what is older is old news, and
        clocks are set back, and differ.
        """
        ended = self.last("end", None) or {}
        return max(now(), int(ended.get("time", -1)) + 1)

    def place_of(self, path: str | Path) -> str:
        """``path`` as a record names it: where it lies in the folder that the records are of, from there."""
        absolute, beside = Path(path).absolute(), self.folder.parent.absolute()
        return str(absolute.relative_to(beside) if absolute.is_relative_to(beside) else absolute)

    def at(self, place: str) -> Path:
        """Where the file is that a record names so."""
        return self.folder.parent / place

    def size(self) -> int:
        """Bytes of records."""
        try:
            return self._records.stat().st_size
        except FileNotFoundError:
            return 0

    def state(self) -> dict[str, Any]:
        """What was noted last: how far records were sent, and to which run."""
        try:
            state: dict[str, Any] = json_text.parse(self._state.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(state, dict):
            return {}
        texts = ("server", "run_id", "experiment_id")
        state = {key: value for key, value in state.items() if key not in texts or isinstance(value, str)}
        if type(state.get("last_step", -1)) is not int:
            del state["last_step"]
        offset = state.get("offset", 0)
        # What was sent already may come again: MLflow has each of it once.
        return state if type(offset) is int and 0 <= offset <= self.size() else {**state, "offset": 0}

    def note(self, state: Mapping[str, Any]) -> None:
        """Note how far records were sent; where the disk is full, they will be sent again."""
        try:
            write_whole(self._state, json.dumps(state))
        except OSError as error:
            log.warning("%s can't be written (%s)", self._state, error.strerror)

    def refuse(self, record: Record, reason: str) -> None:
        """Put aside a record that MLflow will never take."""
        log.warning("MLflow refused a record (%s); it is kept in %s", reason, self.folder / "refused.jsonl")
        with contextlib.suppress(OSError), (self.folder / "refused.jsonl").open("a") as file:
            file.write(json.dumps({"reason": reason, "record": record}, default=str) + "\n")

    def sole_sender(self) -> AbstractContextManager[bool]:
        """Whether this process is, for as long as the context lasts, the one that sends."""
        return file_locks.alone(self.folder / "lock")

    def _write(self) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
                self._unsynced = True
        except OSError as error:
            log.warning(
                "Records for MLflow can't be written to %s (%s); they are kept in memory until they can",
                self._records,
                error.strerror,
            )

    def _open(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._records, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return descriptor


def _parsed(line: bytes) -> Record | None:
    try:
        record = json_text.parse(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
