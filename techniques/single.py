"""One device, nothing parallel: what every other technique must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saturn_airflow.jobs import Job
from saturn_airflow.library import BaseTechnique

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.ranks import Ranks


class Single(BaseTechnique):
    """The whole model and the whole batch on one device."""

    def why_not(self, job: Job, devices: int) -> str | None:
        return None if devices == 1 else "single uses one device"

    def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> nn.Module:
        from saturn_airflow.training.request import DoesNotFit

        if ranks.size != 1:
            raise DoesNotFit("single uses one device")
        return model.to(ranks.device)
