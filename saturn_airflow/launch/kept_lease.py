"""Keeping the devices that a run holds where somebody removes or replaces the folder of leases."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from saturn_airflow.launch.lease_folder import LeaseFolder
from saturn_airflow.launch.leases import Lease, default_folder
from saturn_airflow.model.errors import SaturnError

#: Seconds between two looks.
LOOK_SECONDS = 2.0
#: For how long a run that has its devices waits until it is alone with the folder of leases.
GATE_SECONDS = 0.5


class LeaseLostError(Exception):
    """Another run has devices of this one, which saves nothing and begins anew when it has them again."""


class KeptLease:
    """Holds the devices of ``lease`` by what others lock, too.

    :param folder: of the node's leases; None for the default.
    """

    def __init__(self, lease: Lease, folder: Path | None) -> None:
        self._lease, self._folder = lease, folder or default_folder()
        self._looked_at = time.monotonic()

    def lost(self, *, at_once: bool = False) -> str:
        """Who got devices of it meanwhile, and how, as a sentence; empty where nobody did.

        :param at_once: even if the last look was just now.
        """
        if not at_once and time.monotonic() - self._looked_at < LOOK_SECONDS:
            return ""
        self._looked_at = time.monotonic()
        # A folder that can't be used, a full disk, or whoever is held up in there must not end or hold up a
        # run that has its devices.
        with contextlib.suppress(SaturnError, OSError):
            lease_folder = LeaseFolder(self._folder)
            if self._lease.is_held_in(lease_folder):
                return ""
            with lease_folder.gate(GATE_SECONDS):
                taken = self._lease.hold_again(lease_folder)
            told = "; ".join(f"{holder.who} holds {device}, too" for device, holder in taken.items())
            return f"somebody has replaced the folder of leases {self._folder}: {told}" if told else ""
        return ""
