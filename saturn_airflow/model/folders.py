"""Names of folders, and of the variable that holds some."""

from __future__ import annotations

import hashlib
import re

#: Folders whose files are the user's techniques, separated as in ``PATH``.
TECHNIQUES_VARIABLE = "SATURN_TECHNIQUES_FOLDER"


def slug(name: str) -> str:
    """``name`` as a folder's name: readable, safe, and different for different names."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:80].strip(".")
    return safe if safe == name and safe else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


#: Folders of trainings of a job that a later one stands in for.
SUPERSEDED = "superseded-*"


def superseded(number: int) -> str:
    """The name of the folder of a job's training that was superseded, the ``number``-th."""
    return SUPERSEDED.replace("*", str(number))
