"""A technique of one's own, as docs/own_technique.md describes it."""

from __future__ import annotations

from typing import Any

from saturn_airflow.library import BaseTechnique


class HalfGradients(BaseTechnique):
    """DDP that sends gradients in half precision: half the bytes, not quite the same numbers."""

    def parallelize(self, model: Any, ranks: Any, **parameters: Any) -> Any:
        """The model behind DDP, with a hook that compresses what travels."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        ddp = DistributedDataParallel(model.to(ranks.device))
        ddp.register_comm_hook(None, fp16_compress_hook)
        return ddp
