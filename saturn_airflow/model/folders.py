"""Names of folders, and of the variable that holds some."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

#: Folders whose files are the user's techniques, separated as in ``PATH``.
TECHNIQUES_VARIABLE = "SATURN_TECHNIQUES_FOLDER"
#: What a sweep keeps beside the folders of its jobs.
OF_SWEEPS = frozenset({"champion", "init", "mlflow", "trials"})


def slug(name: str, taken: Collection[str] = ()) -> str:
    """``name`` as a folder's name: readable, safe, and different for different names.

    :param taken: names of other folders beside it.
    """
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:80].strip(".")
    if safe == name and safe and safe not in taken:
        return safe
    return f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


#: Folders of trainings of a job that a later one stands in for.
SUPERSEDED = "superseded-*"


def superseded(number: int) -> str:
    """The name of the folder of a job's training that was superseded, the ``number``-th."""
    return SUPERSEDED.replace("*", str(number))
