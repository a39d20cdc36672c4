"""Reading ``events.jsonl`` of a run: one JSON object a line, the first of them the format of the others.

A line that is being written is not read yet. One that can't be read, after a crash of the machine or on a
damaged disk, is left out and told in the log: what is said after it is not lost. So is one that no supervisor
has written, such as a job's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from saturn_airflow.launch import event_fields
from saturn_airflow.model import formats, json_text

log = logging.getLogger(__name__)

Event = dict[str, Any]
NAME = "events.jsonl"
FORMAT = "a run's events"
#: The first line: not an event, but the format of those that follow.
FORMAT_EVENT = "format"
#: Longer than any event, in bytes.
_TAIL = 1 << 20
#: Bytes that are read at a time.
_PART = 1 << 22
_OF_AN_END: Event = {"reason": "", "traceback": "", "result": {}}


def read(folder: Path, offset: int = 0) -> Iterator[tuple[Event | None, int]]:
    """The events of the run in ``folder`` from ``offset`` (bytes) on, each with the offset of what follows.

    Lines that are none are None.

    :raises NewerFormatError: when a newer version wrote them in a way that this one can't read.
    """
    with suppress(FileNotFoundError), open(folder / NAME, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            event = _event(line)
            if event is None:
                log.warning("%s: the line at byte %d can't be read, and is left out", file.name, offset)
            elif event["event"] == FORMAT_EVENT:
                if not offset:
                    formats.check(event, FORMAT, file.name)
                event = None
            offset += len(line)
            yield event, offset


def ending(folder: Path) -> Event | None:
    """The event ``end`` of the run in ``folder``, if that is the last it said.

    :raises NewerFormatError: when a newer version wrote them in a way that this one can't read.
    """
    with suppress(OSError), open(folder / NAME, "rb") as file:
        first = _event(file.readline())
        if first is not None and first["event"] == FORMAT_EVENT:
            formats.check(first, FORMAT, file.name)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        said = _event((file.read().splitlines() or [b""])[-1])
        if said is not None and said["event"] == "end":
            return said
    return None


def last(folder: Path, kind: str) -> Event | None:
    """The last event of this kind, looked for from the end: training of days says millions of things."""
    wanted = _beginning(kind)
    for lines in _parts_from_end(folder):
        at = len(lines)
        while (at := lines.rfind(wanted, 0, at)) >= 0:
            if (found := _event(_line(lines, at))) is not None:
                return found
    return None


def first_since(folder: Path, mark: str, kind: str) -> Event | None:
    """The first event of this kind after the last ``mark``; None where there is none."""
    found = b""
    for lines in _parts_from_end(folder):
        marked = lines.rfind(_beginning(mark))
        at = lines.find(_beginning(kind), marked + 1)
        found = _line(lines, at) if at >= 0 else found
        if marked >= 0:
            return _event(found)
    return None


def every(folder: Path, kind: str) -> list[Event]:
    """All events of this kind, found without parsing the others, which may be millions."""
    wanted, found = _beginning(kind), list[Event | None]()
    for lines in _parts_from_end(folder):
        at = len(lines)
        while (at := lines.rfind(wanted, 0, at)) >= 0:
            found.append(_event(_line(lines, at)))
    return [event for event in reversed(found) if event is not None]


def _beginning(kind: str) -> bytes:
    """How events of this kind begin, and nothing else can: what jobs say has no line breaks in JSON."""
    return b'\n{"event": "%s"' % kind.encode()


def _line(lines: bytes, at: int) -> bytes:
    """The line behind the line break that is at ``at``."""
    return lines[at + 1 : lines.find(b"\n", at + 1)]


def _parts_from_end(folder: Path) -> Iterator[bytes]:
    """The file in parts of whole lines, the last part first, each behind a line break.

    It is read, and not mapped into memory: a disk that fails under a mapped file, or who cuts that short,
    would end this process by a signal (SIGBUS).
    """
    with suppress(OSError), open(folder / NAME, "rb") as file:
        start, rest, is_whole = file.seek(0, os.SEEK_END), b"", False
        while start > 0:
            start, end = max(0, start - _PART), start
            file.seek(start)
            read = file.read(end - start) + rest
            if not is_whole:  # the last line may be being written
                read = read[: read.rfind(b"\n") + 1]
                is_whole = bool(read)
            # The line in which a part begins is left to the part before it.
            begins = (read.find(b"\n") + 1 or len(read)) if start else 0
            rest, lines = read[:begins], read[begins:]
            if lines:
                yield b"\n" + lines


def seconds_between(first: Mapping[str, Any], then: Mapping[str, Any]) -> float:
    """Seconds between two events of a run, whatever has been done to the machine's clock."""
    # Runs of earlier versions have the time of day alone.
    by = "clock" if "clock" in first and "clock" in then else "time"
    return float(then[by] - first[by])


def order(event: Event) -> float:
    """By what events of one run are put in their order."""
    return float(event["clock"] if "clock" in event else event["time"])


def moment(event: Event, last: Event) -> float:
    """When an event was, in seconds since the epoch, by the clock as it was at the run's ``last`` event: the
    machine's may have been set in between."""
    return float(last["time"]) - seconds_between(event, last)


def _event(line: bytes) -> Event | None:
    """What a line says; None where it can't be read."""
    with suppress(ValueError):
        found = json_text.parse(line)
        if isinstance(found, dict) and isinstance(found.get("event"), str) and _is_whole(found):
            return {**_OF_AN_END, **found} if found["event"] == "end" else found
    return None


def _is_whole(event: Event) -> bool:
    if event["event"] == FORMAT_EVENT:
        return True
    return event_fields.has_time(event) and event_fields.lacking(event) is None
