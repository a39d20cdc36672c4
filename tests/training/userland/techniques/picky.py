"""A user's technique whose candidates fail in different ways, and one of which works."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import torch

from saturn_airflow import BaseTechnique
from saturn_airflow.launch.request import DoesNotFit


class Picky(BaseTechnique):
    def candidates(self, job: Any, devices: int) -> list[dict[str, Any]]:
        return [{"how": how} for how in os.environ["SATURN_TEST_CANDIDATES"].split(",")]

    def parallelize(self, model: Any, ranks: Any, *, how: str) -> Any:
        if how == "memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        if how == "refuse":
            raise DoesNotFit("this model is not to my taste")
        if how == "bug":
            raise AttributeError("the technique's own mistake")
        if how == "hang":
            time.sleep(1000)
        if how == "load slowly":
            time.sleep(4)
        if how == "slow for ever":
            calls = itertools.count()
            model.register_forward_pre_hook(lambda *_: time.sleep(1000 if next(calls) > 2 else 0.0))
        if how == "slow":
            model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        return model
