"""Reading what may not answer, such as a folder on a file server that is away, without waiting for it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from saturn_airflow.launch import forked

_T = TypeVar("_T")
_LEAST_SECONDS = 0.05
#: What takes longer hangs; others may read the same at once.
_HANGS_SECONDS = 1.0


class _Reading(NamedTuple):
    thread: threading.Thread
    began: float


#: What is being read by threads, by its name.
_reading: dict[str, _Reading] = {}


def within(seconds: float, name: str, read: Callable[[], _T]) -> _T:
    """What ``read`` gives, in a thread of its own, which goes on where it takes longer.

    :param name: of what is read; while one of the same name hangs, no other is begun.
    :raises TimeoutError: when it takes longer than that, or an earlier one hangs.
    """
    found: list[_T] = []
    errors: list[BaseException] = []

    def try_it() -> None:
        try:
            found.append(read())
        except BaseException as error:
            errors.append(error)

    before = _reading.get(name)
    hangs_since = before.began if before is not None and before.thread.is_alive() else time.monotonic()
    if time.monotonic() - hangs_since < _HANGS_SECONDS:
        thread = threading.Thread(target=try_it, name="saturn-reading", daemon=True)
        _reading[name] = mine = _Reading(thread, hangs_since)
        thread.start()
        thread.join(seconds)
        if not thread.is_alive():
            if _reading.get(name) is mine:
                _reading.pop(name, None)
            if errors:
                raise errors[0]
            return found[0]
    raise TimeoutError(f"{name} does not answer")


class Patience:
    """How long to wait for several that may not answer.

    :param seconds: for those that don't, all together; from then on, each is waited for 0.05 s.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def within(self, name: str, read: Callable[[], _T]) -> _T:
        """As :func:`within`, for as long as there is patience."""
        began = time.monotonic()
        try:
            return within(max(_LEAST_SECONDS, self._left), name, read)
        except TimeoutError:
            self._left -= time.monotonic() - began
            raise


def those(paths: Iterable[Path], ask: Callable[[Path], bool], seconds: float) -> Iterator[Path]:
    """Those of ``paths`` of which ``ask`` says True, one after another.

    What does not answer, or can't be read, is left out.

    :param seconds: as of :class:`Patience`.
    """
    patience = Patience(seconds)
    for path in paths:
        says = False
        with contextlib.suppress(OSError):
            says = patience.within(f"{ask.__qualname__} {path}", partial(ask, path))
        if says:
            yield path


class ReaderApart:
    """Reads in a process of its own, for one that must not have threads since it forks others.

    :param read: gives JSON-ready data; what it changes is seen nowhere.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._process: int | None = None
        self._pipe = -1
        self._said = b""

    @property
    def is_reading(self) -> bool:
        """Whether it was started, and has not ended yet."""
        return self._process is not None

    def start(self) -> None:
        """Begin to read anew.

        :raises OSError: when there can be no more processes.
        """
        assert not self.is_reading, "one at a time"
        self._pipe, writing = os.pipe()
        try:
            forked.flush()
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                forked.end_with(parent)
                forked.run_and_exit(lambda: self._tell(writing))
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(writing)
        self._process, self._said = os.pidfd_open(pid), b""

    def answer(self, seconds: float) -> Any:
        """What was read; None where there is nothing yet, or nothing was to be had.

        :param seconds: for how long to wait for more of it at the most.
        """
        while self._process is not None and connection.wait([self._pipe], seconds):
            if more := os.read(self._pipe, 1 << 16):
                self._said += more
            else:
                self._end()
                with contextlib.suppress(ValueError):
                    return json.loads(self._said)
        return None

    def _end(self) -> None:
        assert self._process is not None, "it was started"
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            os.waitid(os.P_PIDFD, self._process, os.WEXITED)
        os.close(self._process)
        os.close(self._pipe)
        self._process = None

    def _tell(self, writing: int) -> None:
        """What the process does, which may stay for as long as what it reads does not answer."""
        gc.disable()  # of files that are closed here none is to be closed again
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        forked.close_all_but({0, 1, 2, writing})
        data = json.dumps(self._read()).encode()
        while data:
            data = data[os.write(writing, data) :]
