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


class RestOfSweep:
    """Of the sweep ``key``, by the ledger in ``home``: jobs at other nodes, and those at this one for which
    no task has asked yet.
    """

    def __init__(self, home: str, key: str) -> None:
        self._home, self._key = Path(home), key
        self._here: frozenset[str] | None = None
        self._read_at = -float("inf")
        self._seconds: float | None = None

    def see(self, claims: Iterable[Claim]) -> None:
        """Note who wants or has devices of the node."""
        here = frozenset(claim.job.name for claim in claims if claim.sweep.name == self._key)
        if here != self._here:
            self._here, self._read_at = here, -float("inf")

    def put_in(self, claim: Claim) -> Claim:
        """``claim`` of a job of the sweep, with what the rest needs by now: device-seconds, at the least.

        As it is where the ledger can't be read, or does not know the sweep.
        """
        if self._here is None or claim.sweep.name != self._key:
            return claim
        if time.monotonic() - self._read_at > _READ_SECONDS:
            with suppress(OSError):
                self._seconds = self._read(self._here)
            self._read_at = time.monotonic()
        if self._seconds is None:
            return claim
        return replace(claim, sweep=replace(claim.sweep, elsewhere=self._seconds))

    def _read(self, here: frozenset[str]) -> float | None:
        ledger = Ledger(self._home)
        if (active := ledger.sweep(self._key)) is None or active.sweep.trials:
            return None
        cluster = ledger.cluster([active])
        rest = (job for sweep in cluster.sweeps for job in sweep.jobs if job.name not in here)
        return sum(needs_of(job, cluster.nodes).area for job in rest)
