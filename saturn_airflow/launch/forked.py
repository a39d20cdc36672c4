"""Processes that are forked from one that is warm and has no threads."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1

#: Whether this process was forked from a warm server: it may fork on, since it has no threads.
may_fork = False
#: Those that this process has forked and not yet waited for.
children = set[int]()


class Forked:
    """A child that runs ``function(*arguments)``, in the ways of ``multiprocessing.Process``.

    :param keep_open: its open files besides the standard ones. It closes all others, so that what ends when
        this process ends does not live on in its children.
    """

    def __init__(
        self, function: Callable[..., object], arguments: tuple[Any, ...], keep_open: Collection[int]
    ) -> None:
        self.exitcode: int | None = None
        flush()
        # What is frozen is never collected, so that nothing the child closes is closed twice.
        gc.freeze()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            end_with(parent)
            run_and_exit(lambda: _be_child(function, arguments, keep_open))
        gc.unfreeze()
        children.add(self.pid)
        #: Becomes readable when the child ends.
        self.sentinel = os.pidfd_open(self.pid)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        if self.exitcode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exitcode = os.waitstatus_to_exitcode(status)
                children.discard(self.pid)
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        """Wait until it has ended, for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.is_alive() and (left := deadline - time.monotonic()) > 0:
            connection.wait([self.sentinel], left)

    def kill(self) -> None:
        """End it at once."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)

    def __del__(self) -> None:
        if self.pid:
            os.close(self.sentinel)


def cpu_seconds() -> dict[str, float]:
    """``cpu_seconds`` of the ranks that this process forked and that have ended; nothing where others did."""
    if not may_fork:
        return {}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu_seconds": used.ru_utime + used.ru_stime}


def run_and_exit(work: Callable[[], object]) -> NoReturn:
    """Do ``work`` in a forked process and end it, without returning to what it was forked from."""
    status = 1
    try:
        try:
            work()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            flush()
    finally:  # whatever fails above, such as an excepthook of the job's
        os._exit(status)


@contextlib.contextmanager
def in_one_process() -> Iterator[None]:
    """Around code of others: a process that it forks, and that comes out of it too, ends here.

    Whatever comes after is for the process that went in: the copy has its files and connections, and would
    train beside it.
    """
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != process:
            end_copy(error)
        raise
    if os.getpid() != process:
        end_copy()


def end_copy(error: BaseException | None = None) -> NoReturn:
    """End this process, which a job's code has forked and let go on with what is not its own.

    :param error: what the job's code raised in it.
    """
    status: object = 1
    try:
        if isinstance(error, SystemExit):
            status = 0 if error.code is None else error.code
        else:
            words = "a process that the job's code forked, and that came out of this code, was ended"
            print(words, file=sys.stderr)
            if error is not None:
                traceback.print_exception(error)
        flush()
    finally:
        os._exit(status if isinstance(status, int) else 1)


def end_with(parent: int) -> None:
    """Have the kernel end this process, also one that a signal holds up, when its parent has ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def flush() -> None:
    """Write out what was printed. A job's code may have closed its output, or put in its place what can't."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _be_child(
    function: Callable[..., object], arguments: tuple[Any, ...], keep_open: Collection[int]
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    close_all_but({0, 1, 2, *keep_open})
    function(*arguments)
    atexit._run_exitfuncs()


def close_all_but(keep: Collection[int]) -> None:
    """Close this process's open files, but for those in ``keep``."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:  # the one that the list was read through
                continue
