"""A user's technique that never asks whether to stop."""

from __future__ import annotations

import time
from typing import Any

from saturn_airflow import BaseTechnique


class Deaf(BaseTechnique):
    def execute(
        self, job: Any, devices: Any, session: Any, parameters: Any, batch_count: int | None = None
    ) -> None:
        session.emit("deaf")
        time.sleep(1000)
