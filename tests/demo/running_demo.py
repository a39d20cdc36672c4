"""What is left of a demo that ran."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil


def left_of(state: Path) -> set[str]:
    """Names of live processes that the demo started.

    Those of its services' sessions, and those that left them, such as trainings, but carry the folder in
    their environment. Airflow's overwrite theirs with a title.
    """
    services = {int(note.read_text().split()[0]) for note in (state / "logs").glob("*.pid")}
    found = set()
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error, ProcessLookupError):
            own = services & {os.getsid(process.pid), os.getpgid(process.pid)}
            if own or str(state) in " ".join(process.environ().values()):
                found.add(process.info["name"])
    return found
