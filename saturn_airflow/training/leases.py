"""Leases: the exclusive hold of a node's devices by a running process, all or none.

A device is a file, and who holds the kernel's lock on it (``flock(2)``) holds the device. The lock belongs to
the open file, which the ranks inherit: the kernel frees the device when the last process that could touch it
is gone, however it went. A waiter is a file too, locked in the same way: a ticket, which vanishes with its
waiter. Under one short-held gate, a waiter takes its devices when they are free and no waiter before it
wants them. So nothing is ever held half, which makes a deadlock impossible, and wide jobs are not starved.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saturn_airflow.errors import InvalidSweepError

FOLDER_VARIABLE = "SATURN_LEASES_FOLDER"
Priority = tuple[float, int]


@dataclass(frozen=True)
class Holder:
    """Who holds devices, or waits for them.

    :param who: words for people, such as ``"nightly_retrain/2026-11-21 sweep: job gpt2-small"``.
    :param pid: of the process that asked.
    :param since: seconds since the epoch.
    """

    who: str
    pid: int
    since: float


class GivenUpError(Exception):
    """Who waited for devices no longer wants them."""


class Lease:
    """Devices held by this process and those that inherit :attr:`files`, until the last of them is gone."""

    def __init__(self, devices: tuple[str, ...], files: tuple[int, ...]) -> None:
        self.devices = devices
        #: Open files; a process that has one of them keeps the device.
        self.files = files

    def release(self) -> None:
        """Give up this process's hold."""
        for file in self.files:
            os.close(file)
        self.files = ()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def default_folder() -> Path:
    """The folder of the node's leases: on a disk of the node itself, and the same for all who train there."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / "saturn-leases")


def acquire(
    devices: Sequence[str],
    who: str,
    *,
    count: int | None = None,
    priority: Priority = (0.0, 0),
    folder: Path | None = None,
    on_wait: Callable[[list[str]], None] = lambda holders: None,
    give_up: Callable[[], bool] = lambda: False,
) -> Lease:
    """Wait for devices and hold them.

    :param devices: names of devices.
    :param who: what others read while they wait.
    :param count: how many of them, any that are free; None for all of them.
    :param priority: smaller goes first: when the plan was made (seconds since the epoch), place in the plan.
    :param on_wait: called with the words of those waited for, whenever they change.
    :param give_up: asked again and again; when it says True the wait ends.
    :raises GivenUpError: when ``give_up`` said so.
    :raises InvalidSweepError: when there are fewer devices than asked for, or the folder can't be used.
    """
    wanted = tuple(dict.fromkeys(devices))
    need = len(wanted) if count is None else count
    if not 1 <= need <= len(wanted):
        raise InvalidSweepError(
            f"{who} asks for {need} devices of {len(wanted)}: {', '.join(wanted) or 'none'}"
        )
    room = _Room(folder or default_folder())
    ticket = _Ticket.open(room, priority, Holder(who, os.getpid(), time.time()), wanted, need)
    told: list[str] | None = None
    try:
        while True:
            with room.gate(give_up) as entered:
                if not entered:
                    raise GivenUpError
                ahead = [other for other in room.tickets() if other.order < ticket.order]
                lease = _take(room, ticket, ahead)
                if lease is not None:
                    ticket.close()
                    return lease
                blockers = _blockers(room, ticket, ahead)
            if blockers != told:
                on_wait(blockers)
                told = blockers
            if give_up():
                raise GivenUpError
            time.sleep(min(0.1 * (1 + len(ahead)), 1.0))
    finally:
        ticket.close()


def holders(folder: Path | None = None) -> dict[str, Holder]:
    """Who holds which device now, by the device's name."""
    room = _Room(folder or default_folder())
    with room.gate():
        return {device: holder for device in room.devices() if (holder := room.holder(device)) is not None}


def waiters(folder: Path | None = None) -> list[Holder]:
    """Who waits for devices, first in line first."""
    room = _Room(folder or default_folder())
    with room.gate():
        return [ticket.holder for ticket in room.tickets()]


def _take(room: _Room, ticket: _Ticket, ahead: list[_Ticket]) -> Lease | None:
    """Take the ticket's devices if they are free and not kept for those ahead."""
    taken = {device for device in room.devices() if room.holder(device) is not None}
    for other in ahead:
        # Who is ahead and can't go yet still keeps what is free, or a wide job would wait for ever.
        free = [device for device in other.wanted if device not in taken]
        taken.update(other.wanted if other.need == len(other.wanted) else free[: other.need])
    mine = [device for device in ticket.wanted if device not in taken][: ticket.need]
    if len(mine) < ticket.need:
        return None
    files = [room.lock_device(device) for device in mine]
    for file in files:
        room.write(file, asdict(ticket.holder) | {"since": time.time()})
    return Lease(tuple(mine), tuple(files))


def _blockers(room: _Room, ticket: _Ticket, ahead: list[_Ticket]) -> list[str]:
    held = [holder.who for device in ticket.wanted if (holder := room.holder(device)) is not None]
    before = [other.holder.who for other in ahead if set(other.wanted) & set(ticket.wanted)]
    return list(dict.fromkeys([*held, *before]))


class _Room:
    """The folder with the gate, the devices and the tickets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Everyone who trains on this node shares the folder, whoever they run as.
        with _open_to_all():
            try:
                for part in (folder / "devices", folder / "tickets"):
                    part.mkdir(parents=True, exist_ok=True)
                self._gate = self._open(folder / "gate")
            except OSError as error:
                raise InvalidSweepError(
                    f"the folder of device leases {folder} can't be used ({error.strerror}); "
                    f"set {FOLDER_VARIABLE} to a folder on this node's own disk"
                ) from None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._gate)

    @contextlib.contextmanager
    def gate(self, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        while not _try_lock(self._gate):
            if give_up():
                yield False
                return
            time.sleep(0.005)
        try:
            yield True
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def devices(self) -> list[str]:
        return sorted(path.name for path in (self._folder / "devices").iterdir())

    def holder(self, device: str) -> Holder | None:
        """Who holds ``device``; None where it is free (ask inside the gate)."""
        path = self._folder / "devices" / device
        if not path.exists():
            return None
        file = self._open(path)
        try:
            if _try_lock(file):
                return None
            return _read_holder(file) or Holder("an unknown process", 0, 0.0)
        finally:
            os.close(file)

    def lock_device(self, device: str) -> int:
        with _open_to_all():
            file = self._open(self._folder / "devices" / device)
        locked = _try_lock(file)
        assert locked, f"{device} was free inside the gate"
        return file

    def tickets(self) -> list[_Ticket]:
        """Tickets of live waiters, first in line first; those of dead ones are removed (inside the gate)."""
        found = []
        for path in (self._folder / "tickets").iterdir():
            try:
                file = self._open(path, create=False)
            except FileNotFoundError:
                continue
            try:
                if _try_lock(file):
                    path.unlink(missing_ok=True)
                    continue
                data = _read(file)
            finally:
                os.close(file)
            if data is not None:
                found.append(_Ticket.from_dict(path, data))
        return sorted(found, key=lambda ticket: ticket.order)

    def new_ticket(self, data: dict[str, Any]) -> tuple[Path, int]:
        path = self._folder / "tickets" / uuid.uuid4().hex
        with self.gate(), _open_to_all():
            file = self._open(path)
            fcntl.flock(file, fcntl.LOCK_EX)
            self.write(file, data)
        return path, file

    @staticmethod
    def write(file: int, data: dict[str, Any]) -> None:
        text = json.dumps(data).encode()
        os.pwrite(file, text, 0)
        os.ftruncate(file, len(text))

    @staticmethod
    def _open(path: Path, create: bool = True) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | os.O_CREAT if create else flags, 0o666)


class _Ticket:
    """A waiter's place in the line."""

    def __init__(self, path: Path, data: dict[str, Any], file: int | None = None) -> None:
        self.holder = Holder(**data["holder"])
        self.wanted: tuple[str, ...] = tuple(data["wanted"])
        self.need: int = data["need"]
        self.order = (*data["priority"], self.holder.since, path.name)
        self._path = path
        self._file = file

    @classmethod
    def open(
        cls, room: _Room, priority: Priority, holder: Holder, wanted: tuple[str, ...], need: int
    ) -> _Ticket:
        data = {"priority": list(priority), "holder": asdict(holder), "wanted": list(wanted), "need": need}
        path, file = room.new_ticket(data)
        return cls(path, data, file)

    @classmethod
    def from_dict(cls, path: Path, data: dict[str, Any]) -> _Ticket:
        return cls(path, data)

    def close(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: int) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(os.pread(file, 1 << 20, 0))
    except ValueError:
        return None
    return data


def _read_holder(file: int) -> Holder | None:
    data = _read(file)
    return None if data is None else Holder(data["who"], data["pid"], data["since"])


@contextlib.contextmanager
def _open_to_all() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)
