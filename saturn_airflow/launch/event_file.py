"""Reading ``events.jsonl`` of a run: one JSON object a line, the first of them the format of the others.

A line that is being written is not read yet. One that can't be read, after a crash of the machine or on a
damaged disk, is left out and told in the log: what is said after it is not lost. So is one that no supervisor
has written, such as a job's own.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
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
    # Lines begin so, and nothing else can: what jobs say has no line breaks in JSON.
    wanted = b'{"event": "%s"' % kind.encode()
    said = _said(folder)
    end = said.rfind(b"\n") + 1
    while True:
        at = said.rfind(b"\n" + wanted, 0, end) + 1
        if not at and said[: len(wanted)] != wanted:  # the first line of all has none before it
            return None
        found = _event(said[at : said.find(b"\n", at)])
        if found is not None or not at:
            return found
        end = at


def first_since(folder: Path, mark: str, kind: str) -> Event | None:
    """The first event of this kind after the last ``mark``; None where there is none."""
    said = _said(folder)
    at = said.rfind(b'\n{"event": "%s"' % mark.encode())
    at = said.find(b'\n{"event": "%s"' % kind.encode(), at + 1) + 1 if at >= 0 else 0
    return _event(said[at : said.find(b"\n", at)]) if at else None


def every(folder: Path, kind: str) -> list[Event]:
    """All events of this kind, found without reading the others, which may be millions."""
    wanted = b'\n{"event": "%s"' % kind.encode()
    said, found = _said(folder), list[Event | None]()
    at = said.find(wanted)
    while at >= 0:
        found.append(_event(said[at + 1 : said.find(b"\n", at + 1)]))
        at = said.find(wanted, at + 1)
    return [event for event in found if event is not None]


def _said(folder: Path) -> bytes | mmap.mmap:
    """All of the file, without reading it; nothing where nothing was said yet."""
    with suppress(OSError, ValueError), open(folder / NAME, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return b""


def seconds_between(first: Event, then: Event) -> float:
    """Seconds between two events of a run, whatever has been done to the machine's clock."""
    # Runs of earlier versions have the time of day alone.
    by = "clock" if "clock" in first and "clock" in then else "time"
    return float(then[by] - first[by])


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
