"""What the guard said of a job's strategies, before its training or in it: kept in the job's folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from saturn_airflow import library
from saturn_airflow.launch import handed_over
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model import guards, json_text
from saturn_airflow.model.disks import write_whole

_FILE = "verdicts.json"


class Verdicts:
    """The verdicts of one job, by :func:`verdict_key`.

    :param folder: of the job in its sweep.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE

    def has_any(self) -> bool:
        """Whether there is one of any strategy."""
        return self._file.exists()

    def get(self, key: str) -> str | None:
        """The verdict; None where there is none, or none can be read."""
        return self._all().get(key)

    def set(self, key: str, verdict: str) -> None:
        """Keep a verdict. That the file can't be written costs another look by the guard."""
        with contextlib.suppress(OSError):
            write_whole(self._file, json.dumps({**self._all(), key: handed_over.hidden(verdict)}))

    def _all(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept = dict(json_text.parse(self._file.read_text()))
            return {key: said for key, said in kept.items() if isinstance(said, str)}
        return {}


def verdict_key(spec: RunSpec, technique: library.BaseTechnique) -> str:
    """What verdicts of the guard depend on: the job, and all that says how it is trained."""
    mark, parameters = (
        guards.mark(spec.job, technique.version),
        json.dumps(dict(spec.parameters), sort_keys=True),
    )
    return f"{mark} {spec.technique} {spec.devices} {parameters}"
