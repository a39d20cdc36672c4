"""What a sweep still needs besides its jobs that want or have devices of one node."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.model.claims import Claim
from saturn_airflow.sharing.ranking import needs_of

#: Seconds for which what was read of the ledger counts.
_READ_SECONDS = 20.0
#: The share of its time that who waits reads in at the most, where jobs come and go all the time.
_READING = 0.05


class RestOfSweep:
    """Of the sweep ``key``, by the ledger in ``home``: jobs at other nodes, and those at this one for which
    no task has asked yet.
    """

    def __init__(self, home: str, key: str) -> None:
        self._home, self._key = Path(home), key
        self._here: frozenset[str] | None = None
        self._has_changed = True
        self._read_at, self._took = -float("inf"), 0.0
        #: By job that has not ended, the least device-seconds that it needs.
        self._needs: dict[str, float] | None = None

    def see(self, claims: Iterable[Claim]) -> None:
        """Note who wants or has devices of the node."""
        here = frozenset(claim.job.name for claim in claims if claim.sweep.name == self._key)
        if here != self._here:
            self._here, self._has_changed = here, True

    def put_in(self, claim: Claim) -> Claim:
        """``claim`` of a job of the sweep, with what the rest needs by now: device-seconds, at the least.

        As it is where the ledger can't be read, or does not know the sweep.
        """
        if self._here is None or claim.sweep.name != self._key:
            return claim
        if self._is_stale():
            began = time.monotonic()
            with suppress(OSError):
                self._needs = self._read()
            self._read_at, self._has_changed = time.monotonic(), False
            self._took = self._read_at - began
        if self._needs is None:
            return claim
        rest = sum(needed for job, needed in self._needs.items() if job not in self._here)
        return replace(claim, sweep=replace(claim.sweep, elsewhere=rest))

    def _is_stale(self) -> bool:
        age = time.monotonic() - self._read_at
        return age > _READ_SECONDS or (self._has_changed and age * _READING > self._took)

    def _read(self) -> dict[str, float] | None:
        ledger = Ledger(self._home)
        if (active := ledger.sweep(self._key)) is None or active.sweep.trials:
            return None
        cluster = ledger.cluster([active])
        return {job.name: needs_of(job, cluster.nodes).area for sweep in cluster.sweeps for job in sweep.jobs}
