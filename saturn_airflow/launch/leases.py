"""Leases: the exclusive hold of a node's devices by a running process, all or none.

A device is a file, and who holds the kernel's lock on it (``flock(2)``) holds the device. The lock belongs to
the open file, which the ranks inherit: the kernel frees the device when the last process that could touch it
is gone, however it went. A waiter is a file too, locked in the same way: a ticket, which vanishes with its
waiter. Under one short-held gate, a waiter takes its devices when they are free and no waiter before it
wants them. So nothing is ever held half, which makes a deadlock impossible, and wide jobs are not starved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from saturn_airflow.launch.lease_folder import FOLDER_VARIABLE, Holder, LeaseFolder, Priority, Ticket
from saturn_airflow.model.errors import InvalidSweepError

log = logging.getLogger(__name__)


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
    """The folder of this user's leases on this machine; users who share devices name one of their group's.

    One that an earlier version made for this user in the folder for temporary files goes on being used, since
    leases may be held in it, for as long as it is there.

    :raises InvalidSweepError: when the user has no home folder.
    """
    if configured := os.environ.get(FOLDER_VARIABLE):
        return Path(configured)
    earlier = Path(tempfile.gettempdir()) / "saturn-leases"
    with contextlib.suppress(FileNotFoundError):
        facts = earlier.lstat()
        if facts.st_uid == os.geteuid() and stat.S_ISDIR(facts.st_mode):
            return earlier
        log.warning(
            "%s, where earlier versions kept the leases of devices, is another user's and is not used. If "
            "several users share the devices of this machine, set [saturn] leases_folder (docs/security.md); "
            "if not, remove it",
            earlier,
        )
    try:
        home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        home = Path()
    if not home.is_absolute() or not home.is_dir():
        raise InvalidSweepError(
            f"user {os.geteuid()} has no home folder to keep the leases of devices in; set {FOLDER_VARIABLE} "
            "or [saturn] leases_folder to a folder on this machine's own disk"
        )
    return home / ".local" / "state" / "saturn" / "leases"


def acquire(
    devices: Sequence[str],
    who: str,
    *,
    count: int | None = None,
    priority: Priority = (0.0, 0),
    folder: Path | None = None,
    on_wait: Callable[[list[str]], object] = lambda holders: None,
    on_ignored: Callable[[str], object] = lambda what: None,
    give_up: Callable[[], bool] = lambda: False,
) -> Lease:
    """Wait for devices and hold them.

    :param devices: names of devices.
    :param who: what others read while they wait.
    :param count: how many of them, any that are free; None for all of them.
    :param priority: smaller goes first: when the plan was made (seconds since the epoch), place in the plan.
    :param on_wait: called with the words of those waited for, whenever they change.
    :param on_ignored: called once with each thing in the folder that is not as Saturn writes it, and why.
    :param give_up: asked again and again; when it says True the wait ends.
    :raises GivenUpError: when ``give_up`` said so.
    :raises InvalidSweepError: when there are fewer devices than asked for, or the folder can't be used.
    """
    told: list[str] | None = None
    told_of = set[str]()
    with contextlib.closing(Waiter(devices, who, count=count, priority=priority, folder=folder)) as waiter:
        while (lease := waiter.take()) is None:
            for what in waiter.ignored - told_of:
                on_ignored(what)
            told_of |= waiter.ignored
            if waiter.blockers != told:
                told = waiter.blockers
                on_wait(told)
            if give_up():
                raise GivenUpError
            time.sleep(min(0.1 * (1 + waiter.ahead), 1.0))
    return lease


def holders(folder: Path | None = None) -> dict[str, Holder]:
    """Who holds which device now, by the device's name."""
    room = LeaseFolder(folder or default_folder())
    with room.gate():
        return room.holders()


def names(folder: Path | None = None) -> list[str]:
    """The devices that were ever held."""
    return LeaseFolder(folder or default_folder()).names()


def waiters(folder: Path | None = None) -> list[Holder]:
    """Who waits for devices, first in line first."""
    room = LeaseFolder(folder or default_folder())
    with room.gate():
        return [ticket.holder for ticket in room.tickets()]


def ignored(folder: Path | None = None) -> list[str]:
    """What is in the folder that is not as Saturn writes it, and why: words for people."""
    room = LeaseFolder(folder or default_folder())
    with room.gate():
        room.holders()
        room.tickets()
    return sorted(f"{name}: {why}" for name, why in room.ignored.items())


class Waiter:
    """Someone in the line for devices; takes the arguments of :func:`acquire`.

    :ivar blockers: words of those it waits for, as of the last :meth:`take`.
    :ivar ignored: what it found in the folder that is not as Saturn writes it, and why.
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
        self.ignored: set[str] = set()
        self.ahead = 0
        self._room = LeaseFolder(folder or default_folder())
        holder = Holder(who, os.getpid(), time.time())
        self._ticket = self._room.new_ticket(priority, holder, self.wanted, self.need)

    def take(self) -> Lease | None:
        """Take the devices if they are free and nobody before wants them; the wait is then over."""
        room, ticket = self._room, self._ticket
        with room.gate():
            held = room.holders()
            line = [other for other in room.tickets() if other.order < ticket.order]
            mine = _grant(ticket, line, set(held))
            self.ignored = {f"{name}: {why}" for name, why in room.ignored.items()}
            if mine and (lease := _lock(room, mine, ticket.holder)):
                ticket.close()
                return lease
        users = [held[device].who for device in ticket.wanted if device in held]
        before = [other.holder.who for other in line if set(other.wanted) & set(ticket.wanted)]
        self.ahead = len(before)
        self.blockers = list(dict.fromkeys([*users, *before]))
        return None

    def close(self) -> None:
        """Leave the line."""
        self._ticket.close()


def _grant(ticket: Ticket, line: list[Ticket], held: set[str]) -> tuple[str, ...]:
    """The devices that ``ticket`` may take with ``line`` before it; none if it must wait."""
    taken = set(held)
    for other in line:
        # Who is before and can't go yet still keeps what is free, or a wide job would wait for ever.
        free = [device for device in other.wanted if device not in taken]
        taken.update(other.wanted if other.need == len(other.wanted) else free[: other.need])
    mine = [device for device in ticket.wanted if device not in taken][: ticket.need]
    return tuple(mine) if len(mine) == ticket.need else ()


def _lock(room: LeaseFolder, devices: tuple[str, ...], holder: Holder) -> Lease | None:
    """Lock all of them; none where one is held after all, by a process that passed the gate by."""
    files: list[int] = []
    with contextlib.ExitStack() as taken:
        for device in devices:
            file = room.lock_device(device, holder)
            if file is None:
                return None
            taken.callback(os.close, file)
            files.append(file)
        taken.pop_all()
    return Lease(devices, tuple(files))
