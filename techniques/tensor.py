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

from saturn_airflow.library import BaseTechnique, Parameters
from saturn_airflow.model.jobs import Job

if TYPE_CHECKING:
    from torch import nn

    from saturn_airflow.parallelism.parallel import Parallel
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
# What each entry of a plan makes of a layer. transformers says what they mean in
# ``transformers.distributed.tensor_parallel``; the rest, such as cuts of embeddings, is left whole.
_CUTS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise, gathered",
    "colwise_rep": "colwise, gathered",
    "rowwise_split_input": "rowwise, split",
    "rowwise_rep": "rowwise, split",
}
_LEFT_WHOLE = ("embedding_rowwise", "embedding_colwise", "replicate", "replicated_with_grad_allreduce")


class Tensor(BaseTechnique):
    """Torch's tensor parallelism with the model's own plan."""

    def why_not(self, job: Job, devices: int) -> str | None:
        """On one device there is nothing to cut."""
        return "on one device tensor has nothing to cut" if devices == 1 else None

    def search(self, job: Job, devices: Sequence[int], session: Session) -> tuple[Parameters, float]:
        """Measure it once: it has no parameters."""
        from saturn_airflow.training.searching import refuse_hopeless

        refuse_hopeless(self.name, {}, job, len(devices), session)
        return super().search(job, devices, session)

    def parallelize(self, model: nn.Module, ranks: Ranks, **parameters: Any) -> Parallel:
        """Cut the matrices that the model's plan names, and spread its experts.

        :raises DoesNotFit: when the model has no plan, or its sizes can't be divided by the devices.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        from saturn_airflow.parallelism.cut_draws import CutDraws
        from saturn_airflow.parallelism.tensor_cuts import Experts, TensorCut
        from saturn_airflow.parallelism.unsupported import refuse_scripted

        refuse_scripted(model, "tensor")
        styles = {
            "colwise": ColwiseParallel(),
            "rowwise": RowwiseParallel(),
            "colwise, gathered": ColwiseParallel(output_layouts=Replicate()),
            "rowwise, split": RowwiseParallel(input_layouts=Replicate()),
        }
        plan = plan_of(model)
        stacks = experts_of(model, plan) if ranks.size > 1 else []
        cuts = cuts_of(model, ranks.size, plan, found=bool(stacks))
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        # One after another: all of the model may be more than a device can hold.
        for module, cut in cuts:
            parallelize_module(module.to(ranks.device), mesh, styles[cut])
        layers = {cut: [module for module, its in cuts if its == cut] for cut in styles}
        draws = CutDraws(ranks, layers["colwise"], layers["rowwise"])
        experts = [Experts(module.to(ranks.device), name, mesh, draws) for name, module in stacks]
        model.to(ranks.device)
        return TensorCut(model, ranks, experts, draws)


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """The model's plan for tensor parallelism.

    :raises DoesNotFit: when it has none.
    """
    from saturn_airflow.launch.request import DoesNotFit

    model_type = getattr(getattr(model, "config", None), "model_type", None)
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or _PLANS.get(str(model_type)) or {}
    if not plan:
        why = "its attention weights are fused in one matrix" if model_type == "gpt2" else "it has no tp_plan"
        raise DoesNotFit(f"{type(model).__name__} can't be cut for tensor parallelism: {why}")
    return plan


def experts_of(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, nn.Module]]:
    """The modules, by name, whose experts are spread over the devices, each whole on one of them.

    :raises DoesNotFit: when the model can't compute a part of its experts.
    """
    from saturn_airflow.launch.request import DoesNotFit

    spread = getattr(model, "ep_plan", None) or {}
    found: list[tuple[str, nn.Module]] = []
    for pattern in (pattern for pattern, cut in plan.items() if cut == "moe_tp_experts"):
        if spread.get(pattern) != "ep_dispatch_experts":
            raise DoesNotFit(f"{type(model).__name__} has experts, and no plan of spreading them")
        found += _matching(model, pattern)
    return found


def _matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [(name, module) for name, module in model.named_modules() if expression.fullmatch(name)]


def _check_heads(model: nn.Module, plan: Mapping[str, str], devices: int) -> None:
    """Attention is computed for whole heads, unless its projections are gathered before."""
    from saturn_airflow.launch.request import DoesNotFit

    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if not any(cut == "colwise" and "att" in pattern for pattern, cut in plan.items()) and any(
        cut in _CUTS and "att" in pattern for pattern, cut in plan.items()
    ):
        return
    for heads in ("num_attention_heads", "num_key_value_heads"):
        counts = getattr(config, heads, None)
        for count in counts if isinstance(counts, list | tuple) else [counts]:
            if isinstance(count, int) and count % devices:
                raise DoesNotFit(f"{heads} is {count}, which {devices} devices can't share evenly")


def cuts_of(
    model: nn.Module, devices: int, plan: Mapping[str, str], found: bool
) -> list[tuple[nn.Module, str]]:
    """The linear layers to cut, each with how.

    :param found: whether there is something else to cut.
    :raises DoesNotFit: when the model can't be cut into so many parts.
    """
    from torch import nn
    from torch.nn.utils.parametrize import is_parametrized

    from saturn_airflow.launch.request import DoesNotFit

    _check_heads(model, plan, devices)
    stacks = [pattern for pattern, cut in plan.items() if cut == "moe_tp_experts"]
    cuts: list[tuple[nn.Module, str]] = []
    for pattern, cut in plan.items():
        at_the_ends = cut.startswith("colwise_") and "*" not in pattern  # such as the output layer
        if cut in _LEFT_WHOLE or at_the_ends or any(pattern.startswith(stack) for stack in stacks):
            continue
        if cut not in _CUTS:
            raise DoesNotFit(
                f"{type(model).__name__}'s plan cuts {pattern!r} by {cut!r}, which Saturn can't do"
            )
        for name, module in _matching(model, pattern):
            if not isinstance(module, nn.Linear):
                raise DoesNotFit(f"{name!r} is a {type(module).__name__}; only nn.Linear can be cut")
            if is_parametrized(module):
                raise DoesNotFit(
                    f"{name!r} computes its weight from others (parametrizations): it can't be cut"
                )
            size = module.out_features if cut.startswith("colwise") else module.in_features
            if size % devices:
                raise DoesNotFit(
                    f"{name!r} has a width of {size}, which {devices} devices can't share evenly"
                )
            cuts.append((module, _CUTS[cut]))
    if not cuts and not found:
        raise DoesNotFit(f"{type(model).__name__}'s plan for tensor parallelism matches none of its layers")
    return cuts
