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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from saturn_airflow.model.errors import InvalidSweepError

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
    on_wait: Callable[[list[str]], object] = lambda holders: None,
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
    told: list[str] | None = None
    with contextlib.closing(Waiter(devices, who, count=count, priority=priority, folder=folder)) as waiter:
        while (lease := waiter.take()) is None:
            if waiter.blockers != told:
                told = waiter.blockers
                on_wait(told)
            if give_up():
                raise GivenUpError
            time.sleep(min(0.1 * (1 + waiter.ahead), 1.0))
    return lease


def holders(folder: Path | None = None) -> dict[str, Holder]:
    """Who holds which device now, by the device's name."""
    room = _Room(folder or default_folder())
    with room.gate():
        return room.holders()


def names(folder: Path | None = None) -> list[str]:
    """The devices that were ever held."""
    return _Room(folder or default_folder()).names()


def waiters(folder: Path | None = None) -> list[Holder]:
    """Who waits for devices, first in line first."""
    room = _Room(folder or default_folder())
    with room.gate():
        return [ticket.holder for ticket in room.tickets()]


class Waiter:
    """Someone in the line for devices; takes the arguments of :func:`acquire`.

    :ivar blockers: words of those it waits for, as of the last :meth:`take`.
    :ivar ahead: how many before it in the line want devices that it wants.
    """

    def __init__(
        self,
        devices: Sequence[str],
        who: str,
        *,
        count: int | None = None,
        priority: Priority = (0.0, 0),
        folder: Path | None = None,
    ) -> None:
        self.wanted = tuple(dict.fromkeys(devices))
        self.need = len(self.wanted) if count is None else count
        if not 1 <= self.need <= len(self.wanted):
            there = ", ".join(self.wanted) or "none"
            raise InvalidSweepError(
                f"{who} asks for {self.need} devices; there are {len(self.wanted)}: {there}"
            )
        self.blockers: list[str] = []
        self.ahead = 0
        self._room = _Room(folder or default_folder())
        holder = Holder(who, os.getpid(), time.time())
        self._ticket = self._room.new_ticket(priority, holder, self.wanted, self.need)

    def take(self) -> Lease | None:
        """Take the devices if they are free and nobody before wants them; the wait is then over."""
        room, ticket = self._room, self._ticket
        with room.gate():
            held = room.holders()
            line = [other for other in room.tickets() if other.order < ticket.order]
            mine = _grant(ticket, line, set(held))
            if mine:
                files = tuple(room.lock_device(device, ticket.holder) for device in mine)
                ticket.close()
                return Lease(mine, files)
        users = [held[device].who for device in ticket.wanted if device in held]
        before = [other.holder.who for other in line if set(other.wanted) & set(ticket.wanted)]
        self.ahead = len(before)
        self.blockers = list(dict.fromkeys([*users, *before]))
        return None

    def close(self) -> None:
        """Leave the line."""
        self._ticket.close()


def _grant(ticket: _Ticket, line: list[_Ticket], held: set[str]) -> tuple[str, ...]:
    """The devices that ``ticket`` may take with ``line`` before it; none if it must wait."""
    taken = set(held)
    for other in line:
        # Who is before and can't go yet still keeps what is free, or a wide job would wait for ever.
        free = [device for device in other.wanted if device not in taken]
        taken.update(other.wanted if other.need == len(other.wanted) else free[: other.need])
    mine = [device for device in ticket.wanted if device not in taken][: ticket.need]
    return tuple(mine) if len(mine) == ticket.need else ()


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
    def gate(self) -> Iterator[None]:
        """Be alone with the room; everything below is for those inside."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def holders(self) -> dict[str, Holder]:
        """Who holds which device."""
        found = {}
        for path in sorted((self._folder / "devices").iterdir()):
            file = self._open(path)
            try:
                if not _try_lock(file):
                    data = _read(file)
                    found[path.name] = Holder(**data) if data else Holder("an unknown process", 0, 0.0)
            finally:
                os.close(file)
        return found

    def names(self) -> list[str]:
        return sorted(path.name for path in (self._folder / "devices").iterdir())

    def lock_device(self, device: str, holder: Holder) -> int:
        with _open_to_all():
            file = self._open(self._folder / "devices" / device)
        locked = _try_lock(file)
        assert locked, f"{device} was free inside the gate"
        _write(file, asdict(replace(holder, since=time.time())))
        return file

    def tickets(self) -> list[_Ticket]:
        """Tickets of live waiters, first in line first; those of dead ones are removed."""
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
                found.append(_Ticket(path, data))
        return sorted(found, key=lambda ticket: ticket.order)

    def new_ticket(self, priority: Priority, holder: Holder, wanted: tuple[str, ...], need: int) -> _Ticket:
        data = {"priority": list(priority), "holder": asdict(holder), "wanted": list(wanted), "need": need}
        path = self._folder / "tickets" / uuid.uuid4().hex
        with self.gate(), _open_to_all():
            file = self._open(path)
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, data)
        return _Ticket(path, data, file)

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


def _write(file: int, data: dict[str, Any]) -> None:
    text = json.dumps(data).encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))


@contextlib.contextmanager
def _open_to_all() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)
