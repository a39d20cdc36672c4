"""Pipeline parallelism: every device holds a stretch of the model's blocks; micro-batches flow through them.

GPipe (Huang et al., 2019) runs all micro-batches forward and then all backward. 1F1B (PipeDream-Flush,
Narayanan et al., 2021) starts the backward passes as soon as it can, so that a stage holds the activations
of no more micro-batches than there are stages after it. Both give the gradients of the whole batch.

How a model is cut into stages is told in ``saturn_airflow.parallelism.stages``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.library import BaseTechnique, Parameters
from saturn_airflow.model.jobs import Job

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.parallelism.parallel import Parallel
    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session


class Pipeline(BaseTechnique):
    """Stages of equal work, as counted.

    Its parameters: ``micro_batches``, how many a batch (or, with accumulation, each part of it) is cut into,
    ``schedule``, ``"1f1b"`` or ``"gpipe"``, ``recompute``, as in fsdp, and ``cuts``, the blocks that the
    second stage and those after it begin with. A trial decides the cuts, and all training keeps to them.
    """

    version = "2"

    def why_not(self, job: Job, devices: int) -> str | None:
        """On one device there would be one stage."""
        return "on one device pipeline has one stage" if devices == 1 else None

    def candidates(self, job: Job, devices: int) -> Sequence[Parameters]:
        """1F1B with 2, 4 and 1 micro-batches a device, then GPipe with 2."""
        # One micro-batch is the whole batch, whose samples stay together.
        if job.couples_batch:
            return [{"schedule": "1f1b", "micro_batches": 1}]
        most = max(1, (job.hparams.batch_size or 4 * devices) // job.hparams.accumulate)
        counts = dict.fromkeys(min(most, times * devices) for times in (2, 4, 1))
        few, *_ = counts
        return [
            *({"schedule": "1f1b", "micro_batches": count} for count in counts),
            {"schedule": "gpipe", "micro_batches": few},
        ]

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        """Measure the candidates, then the likeliest two with ``recompute`` where none fits."""
        from saturn_airflow.training.searching import first_that_fits

        plain = self.candidates(job, len(devices))
        return first_that_fits(
            session, plain, [{**parameters, "recompute": True} for parameters in plain[:2]]
        )

    def parallelize(
        self,
        model: nn.Module,
        ranks: Ranks,
        micro_batches: int = 0,
        schedule: str = "1f1b",
        recompute: bool = False,
        cuts: Sequence[int] | None = None,
        **parameters: Any,
    ) -> Parallel:
        """Run this rank's stage; a first micro-batch decides the cuts if they are not given."""
        from saturn_airflow.parallelism.blocks import recompute_blocks
        from saturn_airflow.parallelism.pipelines import Pipelined
        from saturn_airflow.parallelism.unsupported import refuse_batch_norm, refuse_scripted

        refuse_scripted(model, "pipeline")
        refuse_batch_norm(model, ranks)
        if recompute:
            recompute_blocks(model)
        return Pipelined(model, ranks, micro_batches or 2 * ranks.size, schedule, cuts)
