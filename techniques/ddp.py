"""Distributed data parallel: every device holds the whole model and computes its share of the batch.

Gradients are averaged while the backward pass still runs. See Li et al., "PyTorch Distributed" (VLDB 2020)
and ``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saturn_airflow.jobs import Job
from saturn_airflow.library import BaseTechnique

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.ranks import Ranks


class DDP(BaseTechnique):
    """Torch's ``DistributedDataParallel``."""

    def why_not(self, job: Job, devices: int) -> str | None:
        return "on one device ddp does what single does" if devices == 1 else None

    def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        from saturn_airflow.training.limits import refuse_batch_norm

        refuse_batch_norm(model, ranks)
        return DistributedDataParallel(model.to(ranks.device), gradient_as_bucket_view=True)
