"""Fully sharded data parallel: every device computes its share of the batch and keeps a shard of the model.

A block's parameters are gathered just before it is computed and freed after. See Zhao et al., "PyTorch
FSDP" (VLDB 2023) and ``torch.distributed.fsdp.fully_shard``.
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


class FSDP(BaseTechnique):
    """Torch's FSDP2, each block of the model gathered by itself.

    Its parameters: ``keep_gathered`` keeps parameters gathered between the forward and the backward pass,
    ``recompute`` computes activations again in the backward pass instead of keeping them, ``offload`` keeps
    the shards and the optimizer in the host's memory.
    """

    def why_not(self, job: Job, devices: int) -> str | None:
        if job.couples_batch:
            return f"{self.name} cuts batches, and this job couples their samples (couples_batch=True)"
        return "on one device fsdp has nobody to share the model with" if devices == 1 else None

    def candidates(self, job: Job, devices: int) -> Sequence[Parameters]:
        return [{}, {"keep_gathered": True}]

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        from saturn_airflow.training.searching import first_that_fits

        tiers = [{"recompute": True}], [{"recompute": True, "offload": True}]
        return first_that_fits(session, self.candidates(job, len(devices)), *tiers)

    def parallelize(
        self,
        model: nn.Module,
        ranks: Ranks,
        keep_gathered: bool = False,
        recompute: bool = False,
        offload: bool = False,
        **parameters: Any,
    ) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        from saturn_airflow.training.batch_norm import share_batch_norm
        from saturn_airflow.training.blocks import find_blocks, recompute_blocks
        from saturn_airflow.training.limits import refuse_scalar_parameters

        share_batch_norm(model, ranks)
        refuse_scalar_parameters(model, "fsdp shards parameters by their first dimension")
        if recompute:
            recompute_blocks(model)
        if not offload:
            model.to(ranks.device)
        for parameter in model.parameters():
            # A shard of channels_last weights would not be one piece of memory.
            parameter.data = parameter.data.contiguous()
        pin = ranks.device.type == "cuda"
        options: dict[str, Any] = {
            "mesh": init_device_mesh(ranks.device.type, (ranks.size,)),
            "reshard_after_forward": not keep_gathered,
            "offload_policy": CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy(),
        }
        for _, block in find_blocks(model):
            fully_shard(block, **options)
        # What is left, tied weights above all, is one group: the root.
        fully_shard(model, **options)
        return model
