"""Tensor parallelism: every device computes all of the batch with its part of each block's matrices.

Attention heads and the hidden units of the MLPs are spread over the devices; one all-reduce after each of
them puts the parts together. See Shoeybi et al., "Megatron-LM" (2019), and
``torch.distributed.tensor.parallel``.

Which matrices are cut in which direction is said by the model: Hugging Face models bring a plan, and a model
of your own may have an attribute ``tp_plan`` such as ``{"blocks.*.up": "colwise", "blocks.*.down":
"rowwise"}`` (``*`` stands for a number).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saturn_airflow.jobs import Job
from saturn_airflow.library import BaseTechnique, Parameters

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.training.parallel import Parallel
    from saturn_airflow.training.ranks import Ranks
    from saturn_airflow.training.session import Session

# Models of transformers that can be cut but bring no plan, by config.model_type.
_PLANS = {
    "vit": {
        "vit.layers.*.attention.q_proj": "colwise",
        "vit.layers.*.attention.k_proj": "colwise",
        "vit.layers.*.attention.v_proj": "colwise",
        "vit.layers.*.attention.o_proj": "rowwise",
        "vit.layers.*.mlp.fc1": "colwise",
        "vit.layers.*.mlp.fc2": "rowwise",
    }
}
# Ways of cutting embeddings and output layers, which this technique leaves whole on every device.
_LEFT_WHOLE = ("embedding_rowwise", "colwise_gather_output", "colwise_rep")


class Tensor(BaseTechnique):
    """Torch's tensor parallelism with the model's own plan."""

    def why_not(self, job: Job, devices: int) -> str | None:
        return "on one device tensor has nothing to cut" if devices == 1 else None

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        from saturn_airflow.training.searching import refuse_hopeless

        refuse_hopeless(self.name, {}, job, len(devices), session)
        return super().search(job, devices, session)

    def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> Parallel:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        from saturn_airflow.training.parallel import Parallel

        cuts = cuts_of(model, ranks.size)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        model.to(ranks.device)
        for module, cut in cuts:
            parallelize_module(module, mesh, ColwiseParallel() if cut == "colwise" else RowwiseParallel())
        # Cut and whole parameters side by side are too much for optimizers that take many in one kernel.
        return Parallel(model, ranks, optimizer_kernels="one by one")


def cuts_of(model: nn.Module, devices: int) -> list[tuple[nn.Module, str]]:
    """The linear layers to cut, each with ``"colwise"`` or ``"rowwise"``.

    :raises DoesNotFit: when the model has no plan, or can't be cut into so many parts.
    """
    from torch import nn

    from saturn_airflow.training.request import DoesNotFit

    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or _PLANS.get(str(model_type)) or {}
    if not plan:
        why = "its attention weights are fused in one matrix" if model_type == "gpt2" else "it has no tp_plan"
        raise DoesNotFit(f"{type(model).__name__} can't be cut for tensor parallelism: {why}")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, heads, None)
        if count is not None and count % devices:
            raise DoesNotFit(f"{heads} is {count}, which {devices} devices can't share evenly")
    cuts: list[tuple[nn.Module, str]] = []
    for pattern, cut in plan.items():
        if cut in _LEFT_WHOLE:
            continue
        if cut not in ("colwise", "rowwise"):
            raise DoesNotFit(
                f"{type(model).__name__}'s plan cuts {pattern!r} by {cut!r}, which Saturn can't do"
            )
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matching = [(name, module) for name, module in model.named_modules() if expression.fullmatch(name)]
        for name, module in matching:
            if not isinstance(module, nn.Linear):
                raise DoesNotFit(f"{name!r} is a {type(module).__name__}; only nn.Linear can be cut")
            size = module.out_features if cut == "colwise" else module.in_features
            if size % devices:
                raise DoesNotFit(
                    f"{name!r} has a width of {size}, which {devices} devices can't share evenly"
                )
            cuts.append((module, cut))
    if not cuts:
        raise DoesNotFit(f"{type(model).__name__}'s plan for tensor parallelism matches none of its layers")
    return cuts
