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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from saturn_airflow.launch import turn_at_node
from saturn_airflow.launch.holders import Holder
from saturn_airflow.launch.lease_folder import FOLDER_VARIABLE, LeaseFolder, Priority, Ticket
from saturn_airflow.launch.turn_at_node import Sharing
from saturn_airflow.model.claims import HERE, Claim
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Place

log = logging.getLogger(__name__)

#: Seconds between two looks of who waits behind many.
_LONGEST_PAUSE = 2.0
#: For how long who waited takes nothing of a folder that has come in the place of another: who holds devices
#: looks every two seconds, and holds them there from then on.
_SETTLE_SECONDS = 6.0


class GivenUpError(Exception):
    """Who waited for devices no longer wants them."""


class Lease:
    """Devices held by this process and those that inherit :attr:`files`, until the last of them is gone."""

    def __init__(
        self, devices: tuple[str, ...], files: tuple[int, ...], holder: Holder, place: Place | None = None
    ) -> None:
        self.devices = devices
        #: Under what its job is to run there, where that was decided with other sweeps; else as planned.
        self.place = place
        #: As the files of the devices say.
        self.holder = holder
        #: Open files; a process that has one of them keeps the device.
        self.files = files
        self._file_of = dict(zip(devices, files, strict=True))

    def is_held_in(self, lease_folder: LeaseFolder) -> bool:
        """Whether what this run has locked of its devices is what others lock."""
        return all(lease_folder.is_device(device, file) for device, file in self._file_of.items())

    def hold_again(self, lease_folder: LeaseFolder) -> dict[str, Holder]:
        """Hold the devices by what others lock now, where somebody has removed or replaced their files.

        :param lease_folder: the folder as it is now, whose gate the caller holds.
        :returns: by device, who else got it meanwhile: both hold it.
        """
        taken = set[str]()
        for device, file in self._file_of.items():
            if lease_folder.is_device(device, file):
                continue
            found = lease_folder.lock_device(device, self.holder)
            if found is None:
                taken.add(device)
            else:
                self._file_of[device] = found
                self.files += (found,)
        held = lease_folder.holders() if taken else {}
        return {device: holder for device, holder in held.items() if device in taken}

    def tell(self, claim: Claim, lease_folder: LeaseFolder) -> None:
        """Tell those who wait how far the job is by now.

        :param lease_folder: the folder of the lease, whose gate the caller holds.
        """
        self.holder = replace(self.holder, claim=claim)
        for file in self.files:
            lease_folder.tell(file, self.holder)

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
    sharing: Sharing | None = None,
) -> Lease:
    """Wait for devices and hold them.

    :param devices: names of devices.
    :param who: what others read while they wait.
    :param count: how many of them, any that are free; None for all of them.
    :param priority: smaller came first: when the plan was made (seconds since the epoch), place in the plan.
    :param on_wait: called with the words of those waited for, whenever they change.
    :param on_ignored: called once with each thing in the folder that is not as Saturn writes it, and why.
    :param give_up: asked again and again; when it says True the wait ends.
    :param sharing: for a job of a sweep: where others want devices of the node, turns are decided together,
        and with them which devices it gets, how many, and under what it runs. For a trial: when its turn is.
    :raises GivenUpError: when ``give_up`` said so.
    :raises InvalidSweepError: when there are fewer devices than asked for, or the folder can't be used.
    """
    told: list[str] | None = None
    told_of = set[str]()
    waiter = Waiter(devices, who, count, priority, folder, sharing)
    with contextlib.closing(waiter):
        while (lease := waiter.take()) is None:
            for what in waiter.ignored - told_of:
                on_ignored(what)
            told_of |= waiter.ignored
            if waiter.blockers != told:
                told = waiter.blockers
                if told:
                    on_wait(told)
            if give_up():
                raise GivenUpError
            time.sleep(min(0.1 * (1 + waiter.ahead), _LONGEST_PAUSE))
    return lease


def holders(folder: Path | None = None) -> dict[str, Holder]:
    """Who holds which device now, by the device's name."""
    lease_folder = LeaseFolder(folder or default_folder())
    with lease_folder.gate():
        return lease_folder.holders()


def names(folder: Path | None = None) -> list[str]:
    """The devices that were ever held."""
    return LeaseFolder(folder or default_folder()).names()


def waiters(folder: Path | None = None) -> list[Holder]:
    """Who waits for devices; who came first first, which need not be whose turn is first."""
    lease_folder = LeaseFolder(folder or default_folder())
    with lease_folder.gate():
        return [ticket.holder for ticket in lease_folder.tickets()]


def ignored(folder: Path | None = None) -> list[str]:
    """What is in the folder that is not as Saturn writes it, and why: words for people."""
    lease_folder = LeaseFolder(folder or default_folder())
    with lease_folder.gate():
        lease_folder.holders()
        lease_folder.tickets()
    return sorted(f"{name}: {why}" for name, why in lease_folder.ignored.items())


class Waiter:
    """Someone in the queue for devices; takes the arguments of :func:`acquire`.

    :ivar blockers: words of those it waits for, as of the last :meth:`take`.
    :ivar ignored: what it found in the folder that is not as Saturn writes it, and why.
    :ivar ahead: how many before it in the queue want devices that it wants.
    """

    def __init__(
        self,
        devices: Sequence[str],
        who: str,
        count: int | None = None,
        priority: Priority = (0.0, 0),
        folder: Path | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._sharing = sharing
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
        self._folder, self._priority = folder or default_folder(), priority
        holder = Holder(who, os.getpid(), time.time(), None if sharing is None else sharing.claim)
        self._lease_folder, self._ticket = self._join(holder)
        self._takes_from = 0.0

    def _join(self, holder: Holder) -> tuple[LeaseFolder, Ticket]:
        lease_folder = LeaseFolder(self._folder)
        return lease_folder, lease_folder.new_ticket(self._priority, holder, self.wanted, self.need)

    def take(self) -> Lease | None:
        """Take the devices if they are free and nobody before wants them; the wait is then over."""
        if not self._lease_folder.is_there(self._ticket):  # who asks now meets others in another folder
            self._ticket.close()
            self._lease_folder, self._ticket = self._join(self._ticket.holder)
            self._takes_from = time.monotonic() + _SETTLE_SECONDS
        lease_folder, ticket = self._lease_folder, self._ticket
        mine = self._with_the_rest()
        with lease_folder.gate():
            held = lease_folder.holders()
            tickets = lease_folder.tickets()
            if mine != ticket.holder.claim:
                ticket.tell(replace(ticket.holder, claim=mine))
            used = lease_folder.used() if self._sharing else None
            found = turn_at_node.next_devices(ticket, tickets, held, self._sharing, used)
            waits = self._is_met(mine, tickets, held) or time.monotonic() < self._takes_from
            self.ignored = {f"{name}: {why}" for name, why in lease_folder.ignored.items()}
            if found.devices and not waits and (lease := self._lock(found.devices, found.place)):
                ticket.close()
                return lease
        users = [held[device].who for device in ticket.wanted if device in held]
        before = [other.holder.who for other in found.before if set(other.wanted) & set(ticket.wanted)]
        self.ahead = len(before)
        self.blockers = list(dict.fromkeys([*users, *before]))
        return None

    def close(self) -> None:
        """Leave the queue."""
        self._ticket.close()

    def _with_the_rest(self) -> Claim | None:
        """Its claim; where other sweeps have met it, with what its own needs besides by now."""
        claim, sharing = self._ticket.holder.claim, self._sharing
        if claim is None or claim.by_plan or sharing is None or sharing.rest is None:
            return claim
        return sharing.rest.put_in(claim)

    def _is_met(self, before: Claim | None, tickets: list[Ticket], held: Mapping[str, Holder]) -> bool:
        """Whether another sweep has met it just now, so that it does not know yet what its own needs besides.

        :param before: its claim as this look began.
        """
        sharing, claim = self._sharing, self._ticket.holder.claim
        if sharing is None or sharing.rest is None or before is None or claim is None:
            return False
        sharing.rest.see(turn_at_node.claims_at(sharing.node, tickets, held))
        return before.by_plan and not claim.by_plan

    def _lock(self, devices: tuple[str, ...], place: Place | None) -> Lease | None:
        """Lock all of them; none where one is held after all, by a process that passed the gate by."""
        files: list[int] = []
        holder = replace(self._ticket.holder, since=time.time())
        if holder.claim is not None:
            holder = replace(holder, claim=self._placed(holder.claim, devices, place, holder.since))
        with contextlib.ExitStack() as taken:
            for device in devices:
                file = self._lease_folder.lock_device(device, holder)
                if file is None:
                    return None
                taken.callback(os.close, file)
                files.append(file)
            taken.pop_all()
        return Lease(devices, tuple(files), holder, place)

    def _placed(
        self, claim: Claim, devices: tuple[str, ...], place: Place | None, now: float
    ) -> Claim | None:
        """The claim of the job once it has ``devices``."""
        if place is None:
            assert self._sharing is not None, "who has a claim shares"
            ids = tuple(number for number, name in enumerate(self._sharing.node) if name in devices)
            place = Place(claim.technique, len(ids), HERE, ids)
        placed = claim.with_job(place=place, since=now)
        return placed.with_job(setting_up=placed.job.option.setup)
