"""The files of a job's own code, as this process imported them: a resumed training may find them edited."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from saturn_airflow.training.optim import own_classes

# Of a SHA-256 in hexadecimal.
_DIGITS = 16
# What the process was started by, which a later one need not be, and DAG files as Airflow imports them.
_NOT_OF_JOBS = ("__main__", "__mp_main__", "unusual_prefix_")
# sys.stdlib_module_names lacks some of Python's own.
_PYTHONS = sysconfig.get_path("stdlib")


class CodeFiles:
    """Made when the job's model and data have just been loaded: later the files may say something else than
    what was imported."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._seen: set[str] = set()
        self.digests()

    def digests(self) -> Mapping[str, str]:
        """Of each Python module of the job's own, by its name, what its file was when it was first seen."""
        for name in set(sys.modules) - self._seen:
            self._seen.add(name)
            file = own_classes.file_of(name)
            if file is None or not file.endswith(".py") or name.startswith(_NOT_OF_JOBS):
                continue
            if own_classes.is_own(name) and not file.startswith(_PYTHONS):
                with suppress(OSError):
                    self._digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:_DIGITS]
        return self._digests

    def why_mixed(self, before: Mapping[str, str], checkpoint: object) -> str | None:
        """What to tell the user of a training that goes on by other code than it began by; else None.

        :param before: what :meth:`digests` told when ``checkpoint`` was written.
        """
        now = self.digests()
        if not (changed := sorted(name for name in before if now.get(name, before[name]) != before[name])):
            return None
        return (
            f"the code of {', '.join(changed[:5])} has changed since {checkpoint} was written: training goes "
            "on from there by what it says now, so its result may be that of neither alone. To train all of "
            "it by the code of now, start the job from scratch (saturn restart ... --from-scratch)"
        )
