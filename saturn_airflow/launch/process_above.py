"""The process above a run's supervisor: it ends what that leaves, however it went.

A supervisor ends itself what its run leaves. Where it is killed, the kernel gives what descends from it to
the process above, wherever it went: also what is in a session of its own, which no group of processes has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable

from saturn_airflow.launch import descendants
from saturn_airflow.launch.forked import run_and_exit

# Longer than the names of all folders of a run.
_MOST_BYTES = 1 << 16
_files: list[int] = []


def go_on_below(named: Callable[[], object] = lambda: None) -> None:
    """Go on in a child of this process, which stays to end what the child leaves and then ends itself.

    To be called while there are no threads.

    :param named: called in the process that stays, before it waits.
    """
    reading, writing = os.pipe()
    if child := os.fork():
        named()
        run_and_exit(lambda: _stay(child, reading))
    os.close(reading)
    _files.append(writing)


def remove_with_this_process(folder: str) -> None:
    """Have a folder removed when this process has ended, which is below another."""
    for file in _files:
        with contextlib.suppress(BrokenPipeError):  # whoever ended it, this process can do without
            os.write(file, os.fsencode(folder) + b"\0")


def _stay(child: int, told: int) -> None:
    if os.getpgrp() != os.getpid():  # who is in a group of others ends with them
        os.setsid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the child hears them, too
        signal.signal(signum, signal.SIG_IGN)
    descendants.adopt()
    # What it holds open besides would seem to be held by the child.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, told):
            with contextlib.suppress(OSError):
                os.close(int(name))
    while os.wait()[0] != child:
        pass
    os.set_blocking(told, False)
    with contextlib.suppress(BlockingIOError):
        for folder in os.read(told, _MOST_BYTES).split(b"\0"):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
    descendants.end()
