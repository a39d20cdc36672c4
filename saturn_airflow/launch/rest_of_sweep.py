"""What a sweep still needs besides its jobs that want or have devices of one node."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from saturn_airflow.launch.ledger import Ledger, warn_once
from saturn_airflow.launch.read_apart import ReaderApart
from saturn_airflow.model.claims import Claim
from saturn_airflow.sharing.ranking import needs_of

#: Seconds for which what was read of the ledger counts.
_READ_SECONDS = 20.0
#: The share of its time that who waits reads in at the most, where jobs come and go all the time.
_READING = 0.05
#: For how long it is waited for: what it reads may be on a disk that does not answer.
_PATIENCE_SECONDS = 1.0


class RestOfSweep:
    """Of the sweep ``key``, by the ledger in ``home``: jobs at other nodes, and those at this one for which
    no task has asked yet.
    """

    def __init__(self, home: str, key: str) -> None:
        self._home, self._key = Path(home), key
        self._here: frozenset[str] | None = None
        self._has_changed = True
        self._read_at, self._took = -float("inf"), 0.0
        self._reader = ReaderApart(self._read)
        #: By job that has not ended, the least device-seconds that it needs.
        self._needs: dict[str, float] | None = None

    def see(self, claims: Iterable[Claim]) -> None:
        """Note who wants or has devices of the node."""
        here = frozenset(claim.job.name for claim in claims if claim.sweep.name == self._key)
        if here != self._here:
            self._here, self._has_changed = here, True

    def put_in(self, claim: Claim) -> Claim:
        """``claim`` of a job of the sweep, with what the rest needs by now: device-seconds, at the least.

        As it is where the ledger can't be read, or does not know the sweep; by what was read before where
        something there does not answer.
        """
        if self._here is None or claim.sweep.name != self._key:
            return claim
        self._look()
        if self._needs is None:
            return claim
        rest = sum(needed for job, needed in self._needs.items() if job not in self._here)
        return replace(claim, sweep=replace(claim.sweep, elsewhere=rest))

    def _look(self) -> None:
        """Read it anew where that is due; what takes longer is there at a later look."""
        patience = 0.0
        if not self._reader.is_reading:
            if not self._is_stale():
                return
            patience, self._has_changed = _PATIENCE_SECONDS, False
            self._read_at = time.monotonic()
            with suppress(OSError):
                self._reader.start()
        if (found := self._reader.answer(patience)) is not None:
            self._needs, said = found
            for message in said:
                warn_once(message)
        if not self._reader.is_reading:
            self._took = time.monotonic() - self._read_at

    def _is_stale(self) -> bool:
        age = time.monotonic() - self._read_at
        return age > _READ_SECONDS or (self._has_changed and age * _READING > self._took)

    def _read(self) -> tuple[dict[str, float] | None, list[str]]:
        """The needs of its jobs, and what is to be warned of."""
        said: list[str] = []
        ledger = Ledger(self._home, said.append)
        if (active := ledger.sweep(self._key)) is None or active.sweep.trials:
            return None, said
        cluster = ledger.cluster([active])
        found = {j.name: needs_of(j, cluster.nodes).area for sweep in cluster.sweeps for j in sweep.jobs}
        return found, said
