"""Starting services again that ended by themselves, as containers with a restart policy are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from saturn_airflow.deployment.processes import Processes
from saturn_airflow.model.errors import SaturnError

#: The first pause before a service is started again, doubled each time, and the longest (seconds); Docker's.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 60.0
#: A service that has lived for so many seconds is well; Docker's.
_WELL_AFTER = 10.0
#: So often in a row it is started again without getting well: then a person must look. The pauses before
#: that are about three minutes.
_MOST = 11


@dataclass
class _State:
    """How a service fares; times are of the monotonic clock.

    :param due_at: when it is to be started again; None while it runs.
    :param in_a_row: how often it ended without getting well before.
    """

    started_at: float
    due_at: float | None = None
    in_a_row: int = 0


class RestartPolicy:
    """Keeps services running.

    :param names: the services that are to be started again.
    :param say: told of each end in a sentence.
    """

    def __init__(self, processes: Processes, names: Collection[str], say: Callable[[str], object]) -> None:
        self._processes = processes
        self._say = say
        self._states = {name: _State(time.monotonic()) for name in names}

    def look(self) -> None:
        """Start again what is due; to be called about once a second.

        :raises SaturnError: when a service ends again and again, or one that is not to be started again.
        """
        now = time.monotonic()
        for name, state in self._states.items():
            if state.due_at is not None:
                if now >= state.due_at:
                    self._processes.start_again(name)
                    state.started_at, state.due_at = now, None
            elif name in self._processes.running():
                status = self._processes.ended(name)
                if status is not None:
                    self._note_end(name, state, status)
        self._processes.check(spared=self._states)

    def _note_end(self, name: str, state: _State, status: int) -> None:
        """Set when a service that ended is started again; give up on one that has too often."""
        now = time.monotonic()
        state.in_a_row = 1 if now - state.started_at >= _WELL_AFTER else state.in_a_row + 1
        if state.in_a_row > _MOST:
            raise SaturnError(
                f"{name} ended {state.in_a_row} times in a row, the last time with exit status {status}:\n"
                f"{self._processes.tail(name)}"
            )
        # What it left in its process group would be in the way of the next one.
        self._processes.kill(name)
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (state.in_a_row - 1))
        state.due_at = now + pause
        self._say(f"{name} ended with exit status {status}; it is started again in {pause:.1f} s")
