"""One device, nothing parallel: what every other technique must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.jobs import Job
from saturn_airflow.library import BaseTechnique, Parameters

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session


class Single(BaseTechnique):
    """The whole model and the whole batch on one device."""

    def why_not(self, job: Job, devices: int) -> str | None:
        return None if devices == 1 else "single uses one device"

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        from saturn_airflow.training.searching import refuse_hopeless

        refuse_hopeless(self.name, job, len(devices), session)
        return super().search(job, devices, session)

    def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> nn.Module:
        from saturn_airflow.training.request import DoesNotFit

        if ranks.size != 1:
            raise DoesNotFit("single uses one device")
        return model.to(ranks.device)
