"""Plain steps that guards leave for each other: in one trial, and in files for the other trials of a sweep.

What the trial of one technique took, those of others on the same samples need not take again. Weights or data
may be others in each launch, which shows as differences: who is refused by steps from here asks again without
them, and says :meth:`PlainFile.forget` where it passes then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.model import guards
from saturn_airflow.model.disks import write_whole
from saturn_airflow.training.guarding.few_samples import numbers_of_samples

# Of what is in the files.
_FORMAT = 4
# What makes no difference to the plain steps; their learning rate is the guard's.
_JOB = ("name", "techniques", "nodes", "trust", "exact", "on_step", "on_epoch")


class PlainFile:
    """The plain steps that ``spec`` is compared with; in no file where it says no folder for them."""

    def __init__(self, spec: RunSpec) -> None:
        folder = spec.plain_steps_folder
        self.path = Path(folder) / f"{_mark(spec)}.steps" if folder else None
        self._steps = b""

    def read(self) -> bytes:
        """What was written last; empty where nothing was, or it was forgotten."""
        if not self._steps and self.path is not None:
            with contextlib.suppress(OSError):
                self._steps = self.path.read_bytes()
        return self._steps

    def write(self, steps: bytes) -> None:
        """Leave ``steps`` for others. That a file can't be written is no harm."""
        self._steps = steps
        if steps and self.path is not None and not self.path.exists():
            self._replace(steps)

    def forget(self) -> None:
        """Leave nothing for other trials, now and later: the job's steps are others in each launch."""
        self._steps = b""
        if self.path is not None:
            self._replace(b"")

    def _replace(self, steps: bytes) -> None:
        assert self.path is not None
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, steps)


def _mark(spec: RunSpec) -> str:
    job = spec.job
    fields = {key: value for key, value in job.fields().items() if key not in _JOB}
    fields["hparams"] = {key: value for key, value in fields.get("hparams", {}).items() if key != "lr"}
    samples = numbers_of_samples(spec.devices, job.hparams.accumulate)
    where = [spec.kind, spec.initial_weights, guards.versions()]
    # The plain loop takes a whole batch where the technique cuts them.
    facts = [_FORMAT, fields, job.in_micro_batches, samples, spec.technique == "single", where]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
