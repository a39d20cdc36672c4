"""A technique that sleeps as long as training would take, by a known law, and needs no cores for it.

So a machine with few cores can stand for a cluster with many devices: what is measured is what Saturn,
Airflow and Celery add. One batch takes ``model_args["seconds_per_batch"] / devices ** 0.8``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from saturn_airflow import BaseTechnique, Job

SCALING = 0.8


class Asleep(BaseTechnique):
    def search(self, job: Job, devices: Sequence[int], session: Any) -> tuple[dict[str, Any], float]:
        return {}, self._seconds(job, len(devices))

    def execute(
        self,
        job: Job,
        devices: Sequence[int],
        session: Any,
        parameters: Any,
        batch_count: int | None = None,
    ) -> None:
        seconds, batches = self._seconds(job, len(devices)), job.hparams.batches or 1
        session.emit("start", step=0, total_batches=batches, checkpoint=None)
        begin = time.monotonic()
        for step in range(1, batches + 1):
            time.sleep(max(0.0, begin + step * seconds - time.monotonic()))
            if session.stop_requested():
                return
        session.emit("slept", step=batches)

    @staticmethod
    def _seconds(job: Job, devices: int) -> float:
        return float(job.model_args["seconds_per_batch"] / devices**SCALING)
