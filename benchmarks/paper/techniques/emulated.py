"""A technique that sleeps as long as training would take by a law: devices without devices.

``model_args["law"]`` lists ``(technique, devices, seconds of a batch)``; where a number of devices is not in
it, the job's model does not fit. Measuring a job costs what it would: a few batches are slept through.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from saturn_airflow import BaseTechnique, DoesNotFit, Job

_MEASURED_BATCHES = 3


class Emulated(BaseTechnique):
    def search(self, job: Job, devices: Sequence[int], session: Any) -> tuple[dict[str, Any], float]:
        law = [(seconds, name) for name, count, seconds in job.model_args["law"] if count == len(devices)]
        if not law:
            raise DoesNotFit(f"the model does not fit into the memory of {len(devices)} devices")
        seconds, name = min(law)
        began = time.monotonic()
        time.sleep(_MEASURED_BATCHES * seconds)
        return {"under": name, "seconds": seconds}, (time.monotonic() - began) / _MEASURED_BATCHES

    def execute(
        self,
        job: Job,
        devices: Sequence[int],
        session: Any,
        parameters: Mapping[str, Any],
        batch_count: int | None = None,
    ) -> None:
        file, total, seconds = session.folder / "batches", job.hparams.batches or 1, parameters["seconds"]
        done = int(file.read_text()) if file.exists() else 0
        last = total if batch_count is None else min(total, done + batch_count)
        session.emit("start", step=done, total_batches=total, batches_per_epoch=total, checkpoint=None)
        began, first = time.monotonic(), done
        while done < last and not session.stop_requested():
            time.sleep(max(0.0, began + (done + 1 - first) * seconds - time.monotonic()))
            done += 1
            session.emit("step", step=done, epoch=0, loss=1 / done, seconds=seconds)
        file.write_text(str(done))
