"""Who follows a job's runs: one process at a time passes on what they say."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from saturn_airflow.launch import this_machine
from saturn_airflow.launch.file_locks import is_locked, wait_for_lock
from saturn_airflow.launch.standstill import Standstill, is_held_up, parent_of

log = logging.getLogger(__name__)

# Who follows a job and is held up by a signal for so long is ended by the next try, which waits for it.
_FOLLOWER_SECONDS = 10.0
# One that nothing holds up, after so many: Airflow, which began the next try, ends sooner what it knows of.
_LET_GO_SECONDS = 60.0


@contextlib.contextmanager
def sole_follower(
    folder: str | Path, give_up: Callable[[], bool] = lambda: False, on_wait: Callable[[], object] = int
) -> Iterator[bool]:
    """Be the only one who follows a job's runs and passes on what they say; others wait.

    One on this machine that a signal holds up (SIGSTOP) would be waited for for ever, and is ended. So is
    one under a process that is held up, which is Airflow's, and has been given up; and one that does not let
    go for a minute: where Airflow's process above it failed, as on a full disk of logs, nobody answers it.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    :param give_up: asked again and again; when it says True the wait ends.
    :param on_wait: called once where there is somebody to wait for.
    :returns: whether this is the one; False when ``give_up`` said so.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / "follower", "a+") as file:

        def held_up() -> int | None:
            """The follower, or the process above it, whichever is held up."""
            if (pid := follower(folder)) is None:
                return None
            return parent_of(pid) if is_held_up(parent_of(pid)) else pid

        standstill, began = Standstill(held_up), time.monotonic()

        def look() -> bool:
            if message := standstill.look():
                log.warning("An earlier try follows the training, and %s", message)
            late = time.monotonic() - began > _LET_GO_SECONDS
            if (late or standstill.seconds > _FOLLOWER_SECONDS) and (pid := follower(folder)) is not None:
                log.warning("An earlier try, %d, does not let go of the training, and is ended", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return give_up()

        alone = wait_for_lock(file, look, on_wait)
        if alone:
            with contextlib.suppress(OSError):
                file.truncate(0)
                os.write(file.fileno(), f"{this_machine.name()} {os.getpid()}".encode())
        yield alone


def follower(folder: str | Path) -> int | None:
    """The process of this machine that follows a job's runs, if there is one.

    :param folder: the state of the job in its sweep, :attr:`RunSpec.folder`.
    """
    path = Path(folder) / "follower"
    with contextlib.suppress(OSError, ValueError):
        host, pid = path.read_text().split()
        # Who followed before has left its number there, which may be anyone's by now.
        if this_machine.is_meant(host) and int(pid) > 1 and is_locked(path):
            return int(pid)
    return None
