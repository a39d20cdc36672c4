"""Fully sharded data parallel: every device computes its share of the batch and keeps a shard of the model.

A block's parameters are gathered just before it is computed and freed after. See Zhao et al., "PyTorch
FSDP" (VLDB 2023) and ``torch.distributed.fsdp.fully_shard``.
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


class FSDP(BaseTechnique):
    """Torch's FSDP2, each block of the model gathered by itself.

    Its parameters: ``keep_gathered`` keeps parameters gathered between the forward and the backward pass,
    ``recompute`` computes activations again in the backward pass instead of keeping them, ``offload`` keeps
    the shards and the optimizer in the host's memory. ``by_block=False`` gathers all of the model at once,
    for models whose blocks are not computed in one order on every device.
    """

    def why_not(self, job: Job, devices: int) -> str | None:
        """It shares batches among devices: not for one device, nor for jobs that couple the samples of a
        batch."""
        if job.couples_batch:
            return f"{self.name} cuts batches, and this job couples their samples (couples_batch=True)"
        return "on one device fsdp has nobody to share the model with" if devices == 1 else None

    def candidates(self, job: Job, devices: int) -> Sequence[Parameters]:
        """Without and with ``keep_gathered``."""
        return [{}, {"keep_gathered": True}]

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        """Measure the fast variants, then those that save memory, where the ones before do not fit.

        Where ranks compute blocks in different orders, all is tried anew with ``by_block=False``."""
        from saturn_airflow.launch.failures import RanksFailedError
        from saturn_airflow.parallelism.sharding import FIX
        from saturn_airflow.training.searching import first_that_fits

        tiers: list[Sequence[Parameters]] = [
            self.candidates(job, len(devices)),
            [{"recompute": True}],
            [{"recompute": True, "offload": True}],
        ]
        try:
            return first_that_fits(session, *tiers)
        except RanksFailedError as error:
            if FIX not in (error.failure.reason or ""):
                raise
        at_once = [[{**parameters, "by_block": False} for parameters in tier] for tier in tiers]
        return first_that_fits(session, *at_once)

    def parallelize(
        self,
        model: nn.Module,
        ranks: Ranks,
        keep_gathered: bool = False,
        recompute: bool = False,
        offload: bool = False,
        by_block: bool = True,
        **parameters: Any,
    ) -> Parallel:
        """Apply ``fully_shard`` to each block, and to the rest as one unit."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        from saturn_airflow.parallelism.batch_norm import share_batch_norm
        from saturn_airflow.parallelism.blocks import recompute_blocks
        from saturn_airflow.parallelism.sharding import (
            Sharded,
            refuse_unwritable,
            units_of,
            whole_parameters,
        )
        from saturn_airflow.parallelism.unsupported import refuse_scripted, refuse_shortened_embeddings

        refuse_scripted(model, "fsdp")
        refuse_shortened_embeddings(model, ranks)
        share_batch_norm(model, ranks)
        if recompute:
            recompute_blocks(model)
        whole = whole_parameters(model)
        refuse_unwritable(model, whole)
        for name, parameter in model.named_parameters():
            # A shard of channels_last weights would not be one piece of memory.
            parameter.data = parameter.data.to(ranks.device) if name in whole else parameter.data.contiguous()
        pin = ranks.device.type == "cuda"
        options: dict[str, Any] = {
            "mesh": init_device_mesh(ranks.device.type, (ranks.size,)),
            "reshard_after_forward": not keep_gathered,
            "offload_policy": CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy(),
            "ignored_params": {model.get_parameter(name) for name in whole},
        }
        units = units_of(model) if by_block else []
        for unit in units:
            fully_shard(unit, **options)
        # What is left, tied weights above all, is one group: the root.
        fully_shard(model, **options)
        return Sharded(model, ranks, model, units, whole)
