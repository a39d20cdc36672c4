"""Distributed data parallel: every device holds the whole model and computes its share of the batch.

Gradients are averaged while the backward pass still runs. See Li et al., "PyTorch Distributed" (VLDB 2020)
and ``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.library import BaseTechnique, Parameters
from saturn_airflow.model.jobs import Job

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session


class DDP(BaseTechnique):
    """Torch's ``DistributedDataParallel``.

    Its parameter ``recompute`` computes the blocks' activations again in the backward pass instead of keeping
    them.
    """

    holds_own_steps = True

    def why_not(self, job: Job, devices: int) -> str | None:
        """On one device it is ``single``; jobs that couple the samples of a batch can't be cut."""
        if job.couples_batch:
            return f"{self.name} cuts batches, and this job couples their samples (couples_batch=True)"
        return "on one device ddp does what single does" if devices == 1 else None

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        """Measure it plainly, and with ``recompute`` where that does not fit."""
        from saturn_airflow.training.searching import first_that_fits, refuse_hopeless

        # To recompute saves memory and costs time: it is only measured where the rest does not fit.
        refuse_hopeless(self.name, {"recompute": True}, job, len(devices), session)
        return first_that_fits(session, self.candidates(job, len(devices)), [{"recompute": True}])

    def parallelize(
        self,
        model: nn.Module,
        ranks: Ranks,
        recompute: bool = False,
        own_step: bool = False,
        **parameters: Any,
    ) -> Any:
        """Wrap the model in torch's DDP; for steps of a job's own, average gradients after each backward
        pass."""
        from torch.nn.parallel import DistributedDataParallel

        from saturn_airflow.parallelism.batch_norm import share_batch_norm
        from saturn_airflow.parallelism.blocks import recompute_blocks
        from saturn_airflow.parallelism.own_step_replicas import OwnStepReplicas
        from saturn_airflow.parallelism.unsupported import refuse_shortened_embeddings

        refuse_shortened_embeddings(model, ranks)
        share_batch_norm(model, ranks)
        if recompute:
            recompute_blocks(model)
        if own_step:
            return OwnStepReplicas(model.to(ranks.device), ranks)
        # As views of what is sent, gradients are in memory once instead of twice.
        return DistributedDataParallel(model.to(ranks.device), gradient_as_bucket_view=True)
