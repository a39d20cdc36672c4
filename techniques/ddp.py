"""Distributed data parallel: every device holds the whole model and computes its share of the batch.

Gradients are averaged while the backward pass still runs. See Li et al., "PyTorch Distributed" (VLDB 2020)
and ``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.jobs import Job
from saturn_airflow.library import BaseTechnique, Parameters

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session


class DDP(BaseTechnique):
    """Torch's ``DistributedDataParallel``."""

    def why_not(self, job: Job, devices: int) -> str | None:
        return "on one device ddp does what single does" if devices == 1 else None

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        from saturn_airflow.training.searching import refuse_hopeless

        refuse_hopeless(self.name, job, len(devices), session)
        return super().search(job, devices, session)

    def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        from saturn_airflow.training.limits import refuse_batch_norm

        refuse_batch_norm(model, ranks)
        return DistributedDataParallel(model.to(ranks.device), gradient_as_bucket_view=True)
