"""The folder of a machine's leases: a gate, a file a device, and a file (a ticket) for each who waits.

It belongs to one user, or is shared by a group (docs/security.md). Anyone who may write to it may have put
there what is in it: nothing is believed unchecked, nothing is followed out of it, and nothing but this user's
own tickets is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from saturn_airflow.launch import trusted_folder
from saturn_airflow.launch.file_locks import try_lock
from saturn_airflow.launch.holders import Holder, is_count, is_moment
from saturn_airflow.launch.trusted_folder import UntrustedFolderError
from saturn_airflow.model import disks, formats, json_text
from saturn_airflow.model.errors import DiskError, InvalidSweepError
from saturn_airflow.sharing import use
from saturn_airflow.sharing.line import Order

FOLDER_VARIABLE = "SATURN_LEASES_FOLDER"
Priority = tuple[float, int]

_TICKET = re.compile(r"[0-9a-f]{32}")
#: What is believed of a file at the most: devices, teams.
_MOST_DEVICES = 10_000
_MOST_TEAMS = 1000
_USED = "used"
_GATE_PAUSE = 0.01
USE = "what teams used of a node's devices"


class LeaseFolderError(DiskError, InvalidSweepError):
    """The folder can't be used as it is: the fault of a machine, which may be mended, and of no job."""


class LeaseFolder:
    """The folder, opened.

    :ivar ignored: what was found in it that is not as Saturn writes it, by name, with the reason.
    :raises LeaseFolderError: when it can't be used, or others could tamper with it.
    :raises DiskError: when its disk is full or fails.
    """

    def __init__(self, folder: Path) -> None:
        self.ignored: dict[str, str] = {}
        self._folder = folder
        with contextlib.ExitStack() as opened:
            try:
                self._top = top = trusted_folder.open_folder(folder)
                opened.callback(os.close, top)
                self._shared = self._settle_mode(folder, top)
                self._devices = self._open_part(opened, folder, top, "devices")
                self._tickets = self._open_part(opened, folder, top, "tickets")
                self._gate = self._open(top, "gate", create=True)
                opened.callback(os.close, self._gate)
            except UntrustedFolderError as error:
                raise LeaseFolderError(
                    f"the folder of device leases {folder} can't be trusted: {error}. Set {FOLDER_VARIABLE} "
                    "or [saturn] leases_folder to a folder of your own on this machine's disk, or, where "
                    f"several users share its devices, to one of a group's: {_how_to_share(folder)}"
                ) from None
            except OSError as error:
                if disks.is_fault(error):
                    raise disks.fault(folder, error) from None
                raise LeaseFolderError(
                    f"the folder of device leases {folder} can't be used ({error.strerror}); "
                    f"set {FOLDER_VARIABLE} to a folder on this node's own disk"
                ) from None
            self._files = opened.pop_all()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self._files.close()

    @contextlib.contextmanager
    def gate(self, seconds: float | None = None) -> Iterator[None]:
        """Be alone with the folder; everything below is for those inside.

        :param seconds: for how long to wait at the most: whoever is inside may be held up by a signal.
        :raises TimeoutError: when somebody is inside for longer.
        :raises DiskError: when the folder's disk is full or fails under what is done inside.
        """
        if seconds is None:
            fcntl.flock(self._gate, fcntl.LOCK_EX)
        else:
            until = time.monotonic() + seconds
            while not try_lock(self._gate):
                if time.monotonic() > until:
                    raise TimeoutError("somebody is held up inside the folder of device leases")
                time.sleep(_GATE_PAUSE)
        try:
            yield
        except OSError as error:
            if disks.is_fault(error):
                raise disks.fault(self._folder, error) from None
            raise
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def is_there(self, ticket: Ticket) -> bool:
        """Whether it is still what stands where it was opened, with ``ticket`` in it: somebody may have
        removed or replaced it."""
        if not ticket.is_there():
            return False
        parts = {".": self._top, "devices": self._devices, "tickets": self._tickets, "gate": self._gate}
        try:
            return all(
                os.path.samestat(os.stat(self._folder / name), os.fstat(file)) for name, file in parts.items()
            )
        except OSError:
            return False

    def is_device(self, device: str, file: int) -> bool:
        """Whether an open file is what others lock to have a device."""
        try:
            return os.path.samestat(os.stat(device, dir_fd=self._devices), os.fstat(file))
        except FileNotFoundError:
            return False

    def holders(self) -> dict[str, Holder]:
        """Who holds which device."""
        found = {}
        for name in self.names():
            try:
                file = self._open(self._devices, name)
            except FileNotFoundError:
                continue
            except OSError as error:
                if disks.is_fault(error):  # it would seem to be free
                    raise
                self._ignore("devices", name, error)
                continue
            try:
                if not try_lock(file):
                    found[name] = _holder_of(file)
            finally:
                os.close(file)
        return found

    def names(self) -> list[str]:
        """The devices that were ever held."""
        return sorted(filter(_is_name, os.listdir(self._devices)))

    def lock_device(self, device: str, holder: Holder) -> int | None:
        """Take a device that is free; None where somebody holds it nevertheless.

        :raises InvalidSweepError: when its file is none of Saturn's.
        """
        if not _is_name(device):
            raise InvalidSweepError(f"{device!r} can't be the name of a device: a file is named after it")
        try:
            file = self._open(self._devices, device, create=True)
        except OSError as error:
            if disks.is_fault(error):
                raise
            raise InvalidSweepError(
                f"the lease of {device} can't be taken: its file is {_why(error)}; remove devices/{device} "
                "from the folder of leases"
            ) from None
        if not try_lock(file):
            os.close(file)
            return None
        _write(file, replace(holder, since=time.time()).to_dict())
        return file

    def tell(self, file: int, holder: Holder) -> None:
        """Say anew who holds a device.

        :param file: what :meth:`lock_device` gave.
        """
        _write(file, holder.to_dict())

    def tickets(self) -> list[Ticket]:
        """Tickets of live waiters, who came first first; this user's dead ones are removed."""
        found = []
        for name in os.listdir(self._tickets):
            try:
                if not _TICKET.fullmatch(name):
                    raise ValueError("not named as tickets are")
                file = self._open(self._tickets, name)
                try:
                    if not try_lock(file):
                        found.append(Ticket(name, _read(file)))
                    elif os.fstat(file).st_uid == os.geteuid():
                        os.unlink(name, dir_fd=self._tickets)
                finally:
                    os.close(file)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                if disks.is_fault(error):
                    raise
                self._ignore("tickets", name, error)
        return sorted(found, key=lambda ticket: ticket.order)

    def new_ticket(self, priority: Priority, holder: Holder, wanted: tuple[str, ...], need: int) -> Ticket:
        """Join the queue for devices.

        :param wanted: names of devices, of which it ``need``s so many.
        """
        data = {
            "priority": list(priority),
            "holder": holder.to_dict(),
            "wanted": list(wanted),
            "need": need,
        }
        name = uuid.uuid4().hex
        with self.gate():
            file = self._open(self._tickets, name, create=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, data)
        return Ticket(name, data, file, self._tickets)

    def used(self) -> dict[str, float]:
        """By team, the device-seconds that jobs which have left used here of late; what can't be is none."""
        try:
            file = self._open(self._top, _USED)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._ignore(".", _USED, error)
            return {}
        try:
            return _used_of(_read(file))
        except ValueError as error:
            self._ignore(".", _USED, error)
            return {}
        finally:
            os.close(file)

    def count_use(self, team: str, devices: int, seconds: float) -> None:
        """``team`` had so many devices for so many seconds, until now.

        :raises OSError: when that can't be written.
        """
        used = use.with_held(self.used(), team, devices, seconds)
        file = self._open(self._top, _USED, create=True)
        try:
            _write(file, {**formats.stamp(USE), "at": time.time(), "used": used})
        finally:
            os.close(file)

    def _settle_mode(self, folder: Path, top: int) -> bool:
        """Whether a group shares the folder; one of this user's that is open to others is closed to them."""
        facts = os.fstat(top)
        if trusted_folder.is_shared(facts.st_mode):
            return True
        if trusted_folder.is_writable_by_others(facts) or facts.st_uid != os.geteuid():
            if facts.st_uid != os.geteuid() or (
                facts.st_mode & stat.S_ISGID and facts.st_mode & stat.S_IWGRP
            ):
                mode = stat.S_IMODE(facts.st_mode)
                raise UntrustedFolderError(f"it has mode {mode:04o}; a folder that users share has mode 3770")
            self._close_to_others(top, (".", "devices", "tickets"))
        return False

    def _close_to_others(self, top: int, parts: tuple[str, ...]) -> None:
        """Make a folder this user's alone, as long as nobody else has used it."""
        with contextlib.ExitStack() as opened:
            folders = []
            for part in parts:
                with contextlib.suppress(FileNotFoundError):
                    folders.append(os.open(part, _FOLDER, dir_fd=top))
                    opened.callback(os.close, folders[-1])
            for folder in folders:
                for name in os.listdir(folder):
                    owner = os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid
                    if owner not in (0, os.geteuid()):
                        user = trusted_folder.user_name(owner)
                        raise UntrustedFolderError(f"anybody may write to it, and user {user} did ({name})")
            for folder in folders:
                os.fchmod(folder, 0o700)

    def _open_part(self, opened: contextlib.ExitStack, folder: Path, top: int, name: str) -> int:
        owner = os.fstat(top).st_uid
        mode = trusted_folder.SHARED if self._shared else 0o700
        try:
            part = os.open(name, _FOLDER, dir_fd=top)
        except FileNotFoundError:
            if owner != os.geteuid():
                raise UntrustedFolderError(f"{name} is missing in it, which its owner makes") from None
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=top)
            part = os.open(name, _FOLDER, dir_fd=top)
            os.fchmod(part, mode)
        except NotADirectoryError:
            raise UntrustedFolderError(f"{name} in it is no folder, but a link or a file") from None
        opened.callback(os.close, part)
        facts = os.fstat(part)
        if facts.st_uid != owner:
            raise UntrustedFolderError(f"{name} belongs to user {trusted_folder.user_name(facts.st_uid)}")
        if self._shared and (
            not trusted_folder.is_shared(facts.st_mode) or facts.st_gid != os.fstat(top).st_gid
        ):
            raise UntrustedFolderError(f"{name} has another group or mode than the folder itself")
        if not self._shared and trusted_folder.is_writable_by_others(facts):
            self._close_to_others(top, (name,))
        return part

    def _open(self, folder: int, name: str, create: bool = False) -> int:
        """Open a regular file of the folder itself, which has no other name.

        Without O_CREAT where it is there: Linux refuses that for others' files in folders such as these
        (``fs.protected_regular``).
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(name, flags, dir_fd=folder)
        except FileNotFoundError:
            if not create:
                raise
            with trusted_folder.umask(0o007 if self._shared else 0o077):
                try:
                    file = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
                except FileExistsError:
                    file = os.open(name, flags, dir_fd=folder)
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            os.close(file)
            raise OSError(errno.EINVAL, "a hard link" if stat.S_ISREG(facts.st_mode) else "no regular file")
        return file

    def _ignore(self, part: str, name: str, error: Exception) -> None:
        shown = name if name.isprintable() else ascii(name)
        self.ignored[f"{part}/{shown}"] = _why(error)


class Ticket:
    """A waiter's place in the queue for devices.

    :ivar order: who came first: by the priority, then since when it waits.

    :raises ValueError: when the data are not those of a ticket.
    """

    def __init__(self, name: str, data: Any, file: int | None = None, folder: int | None = None) -> None:
        if not isinstance(data, dict) or not {"holder", "wanted", "need", "priority"} <= set(data):
            raise ValueError("not written as tickets are")
        self.holder = Holder.read(data["holder"])
        wanted, need, priority = data["wanted"], data["need"], data["priority"]
        if not isinstance(wanted, list) or not 1 <= len(wanted) <= _MOST_DEVICES:
            raise ValueError("it wants no devices")
        if not all(isinstance(name, str) for name in wanted) or len(set(wanted)) < len(wanted):
            raise ValueError("what it wants are not devices")
        if not is_count(need) or not 1 <= need <= len(wanted):
            raise ValueError("it needs more devices than it wants")
        if not isinstance(priority, list) or len(priority) != 2 or not all(map(is_moment, priority)):
            raise ValueError("its priority is not two numbers")
        self.wanted: tuple[str, ...] = tuple(wanted)
        self.need: int = need
        self.order: Order = (*priority, self.holder.since, name)
        self._data = data
        self._name = name
        self._file = file
        self._folder = folder

    def tell(self, holder: Holder) -> None:
        """Say anew who waits."""
        assert self._file is not None, "only who waits may say who it is"
        self.holder = holder
        _write(self._file, {**self._data, "holder": holder.to_dict()})

    def is_there(self) -> bool:
        """Whether others see it, as far as its file tells."""
        assert self._file is not None, "only who waits asks"
        return os.fstat(self._file).st_nlink > 0

    def close(self) -> None:
        """Leave the queue."""
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._folder)
            os.close(self._file)
            self._file = None


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _how_to_share(folder: Path) -> str:
    return f"sudo install -d -g GROUP -m 3770 {folder} {folder}/devices {folder}/tickets"


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return "a link" if error.errno == errno.ELOOP else error.strerror or str(error)
    return str(error)


def _holder_of(file: int) -> Holder:
    with contextlib.suppress(ValueError):
        return Holder.read(_read(file))
    return Holder("an unknown process", 0, 0.0)


def _read(file: int) -> Any:
    try:
        return json_text.parse(os.pread(file, 1 << 20, 0))
    except ValueError:
        raise ValueError("no JSON") from None


def _write(file: int, data: dict[str, Any]) -> None:
    text = json.dumps(data).encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))


def _used_of(data: Any) -> dict[str, float]:
    """What a file says that teams used, by now.

    :raises ValueError: when it says nothing that can be.
    """
    try:
        formats.check(data, USE, "it")
        used = {str(team): value for team, value in data["used"].items()}
        if len(used) > _MOST_TEAMS or not all(is_moment(v) and v >= 0 for v in [*used.values(), data["at"]]):
            raise ValueError("not what teams used")
    except (KeyError, TypeError, AttributeError, formats.NewerFormatError) as error:
        raise ValueError(str(error)) from None
    return use.decayed(used, time.time() - data["at"])


def _is_name(device: str) -> bool:
    return device.isprintable() and "/" not in device and device.strip(".") != "" and len(device) <= 200
