"""A model of which every rank computes all of the batch with its part of the matrices.

Parameters that are cut get the gradient of their part. Of those that are whole on every rank, some lie where
all ranks compute the same, and get the whole gradient on each; others, such as the norms of single attention
heads, lie between cut layers: each rank's gradient is of its heads alone, and the whole one is their sum.
Which is which is found out by computing gradients, with random numbers for weights, so that none is 0 or the
same by chance.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.parallelism.cut_draws import CutDraws
from saturn_airflow.parallelism.module_state import ModuleState, parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import rng
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

# The L2 distance of the ranks' gradients of one parameter from their mean, over their L2 norm: alike up to
# rounding it is below 0.01, in bfloat16 too; of independent parts on k ranks it is sqrt(1 - 1/k), at least
# 0.7. What lies between the two bounds is neither, and refused.
_SAME, _DIFFERENT = 0.03, 0.2
# The standard deviation of what is added to weights for that, about that of common initial weights.
_NOISE = 0.05


class TensorCut(Parallel):
    """A model with matrices cut among the ranks.

    :param experts: those of its modules that hold experts, of which each rank has some.
    :param draws: has random numbers drawn by each rank where features are cut.
    """

    wants_example = True

    def __init__(self, model: nn.Module, ranks: Ranks, experts: Sequence[Experts], draws: CutDraws) -> None:
        # Cut and whole parameters side by side are too much for optimizers that take many in one kernel.
        super().__init__(model, ranks, optimizer_kernels="two kinds")
        self._experts = experts
        self._draws = draws
        self._partial: list[nn.Parameter] = []
        self._undecided: dict[str, nn.Parameter] = {}

    def prepare(self, objective: Objective, batch: Any, samples: int) -> None:
        """Find out which gradients of whole parameters are partial, in one backward pass with random weights.

        :raises DoesNotFit: when a gradient is neither the same on all ranks nor a part of one, or random
            numbers would be others than on one device.
        """
        if self.ranks.size == 1:
            return
        whole = {name: p for name, p in self.trainable().items() if not isinstance(p, DTensor)}
        self.model.train()
        with (
            self._draws.watched(),  # its hooks stay
            ModuleState(self.model.modules()).put_back(),
            _random_weights(self.model, self.ranks),
        ):
            rng.seed("gradients of whole parameters")
            objective.begin(samples)
            self.backward(objective, batch, samples, 1 / max(1, samples), True)
            apart = {name: _apart(p, self.ranks) for name, p in whole.items()}
        for parameter in parameters_of(self.model):
            parameter.grad = None
        verdicts = _verdicts(apart)
        self._partial = [whole[name] for name, partial in verdicts.items() if partial]
        self._undecided = {name: p for name, p in whole.items() if name not in verdicts}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, of which losses are computed."""
        self._draws.begin()
        return super().call(*args, **kwargs)

    def finish_gradients(self) -> None:
        """Add up partial gradients over the ranks.

        :raises DoesNotFit: when a parameter has its first gradient only now, so that nobody knows which
            kind it is.
        """
        self._check_decided()
        for parameter in self._partial:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        for experts in self._experts:
            experts.finish_gradients()

    def _check_decided(self) -> None:
        """:raises DoesNotFit: where there is a gradient now that may be whole or partial."""
        for name, parameter in self._undecided.items():
            if parameter.grad is not None:
                raise DoesNotFit(
                    f"parameter {name!r} is between layers that are cut or is not, which its first gradient "
                    "would have told, and had none; use another technique"
                )


class Experts:
    """A module of experts whose weights are stacked, of which this rank computes a part for all tokens.

    Tokens of the other ranks' experts get the number after this rank's last, which such modules pass over: it
    is how transformers itself spreads experts.
    """

    def __init__(self, module: nn.Module, name: str, mesh: DeviceMesh, draws: CutDraws) -> None:
        number = getattr(module, "num_experts", None)
        names = [key for key, p in module.named_parameters(recurse=False)]
        if number is None or not names or any(module.get_parameter(key).shape[0] != number for key in names):
            raise DoesNotFit(f"{name!r} does not hold its experts' weights in stacks")
        if number % mesh.size():
            raise DoesNotFit(f"{name!r} has {number} experts, which {mesh.size()} devices can't share evenly")
        self._module, self._mesh = module, mesh
        self._name, self._draws = name, draws
        self._called = False
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        if not {"hidden_states", "top_k_index", "top_k_weights"} <= self._signature.parameters.keys():
            raise DoesNotFit(f"{name!r} is not handed its tokens' experts as transformers' modules are")
        self._count = number // mesh.size()
        module.num_experts = self._count
        module._is_expert_parallel = True  # type: ignore[assignment]
        for key in names:
            whole = module.get_parameter(key)
            cut = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(cut, requires_grad=whole.requires_grad))
        module.forward = self._compute

    def finish_gradients(self) -> None:
        """A part of a stack that no token went to has a gradient of 0, as it has in the whole stack."""
        if self._called:
            for parameter in self._module.parameters(recurse=False):
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._called = False

    def _compute(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._called = self._called or torch.is_grad_enabled()
        given = self._signature.bind(*args, **kwargs)
        chosen = given.arguments["top_k_index"]
        elsewhere = chosen // self._count != self._mesh.get_local_rank()
        same = given.arguments["hidden_states"], given.arguments["top_k_weights"]
        states, weights = _SumGradients.apply(*same)  # type: ignore[no-untyped-call]
        given.arguments["hidden_states"] = states
        given.arguments["top_k_index"] = torch.where(elsewhere, self._count, chosen % self._count)
        given.arguments["top_k_weights"] = weights.masked_fill(elsewhere, 0)
        with self._local_parameters(), self._draws.apart(self._name):
            result = self._forward(*given.args, **given.kwargs)
        return _Sum.apply(result, states, weights)  # type: ignore[no-untyped-call,no-any-return]

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        own = dict(self._module._parameters)
        for key, parameter in own.items():
            assert isinstance(parameter, DTensor)
            self._module._parameters[key] = parameter.to_local()
        try:
            yield
        finally:
            self._module._parameters.update(own)


class _Sum(torch.autograd.Function):
    """The sum of what the ranks computed from ``same``; the gradient of the sum is each one's.

    Where no token went to a rank's experts it computed from nothing: the gradients of ``same`` are zeros
    then, for which the others wait.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, *same: torch.Tensor) -> torch.Tensor:
        ctx.zeros = [one.new_zeros(()).expand(one.shape) for one in same]
        part = part.contiguous().clone()
        dist.all_reduce(part)
        return part

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *ctx.zeros


class _SumGradients(torch.autograd.Function):
    """What all ranks have alike; the gradients are the sums of the ranks', in the same order on all."""

    @staticmethod
    def forward(ctx: Any, *same: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.view_as(one) for one in same)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = tuple(gradient.contiguous().clone() for gradient in gradients)
        for one in sums:
            dist.all_reduce(one)
        return sums


@contextmanager
def _random_weights(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Add noise to all weights: the same on all ranks where they are whole. They are as before afterwards."""
    parameters = list(parameters_of(model))
    local = [t.to_local() if isinstance(t, DTensor) else t for t in (p.detach() for p in parameters)]
    saved = [tensor.to("cpu", copy=True) for tensor in local]
    with torch.no_grad():
        for number, (parameter, values) in enumerate(zip(parameters, local, strict=True)):
            if parameter.is_floating_point():
                part = ranks.rank if isinstance(parameter, DTensor) and not _is_whole(parameter) else -1
                noise = torch.randn(values.shape, generator=rng.generator("noise", number, part))
                values.add_(noise.to(values), alpha=_NOISE)
    try:
        yield
    finally:
        with torch.no_grad():
            for values, before in zip(local, saved, strict=True):
                values.copy_(before)


def _is_whole(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _apart(parameter: nn.Parameter, ranks: Ranks) -> float:
    """How far the ranks' gradients are apart, relative to their size; NaN where there is none."""
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    mean = gradient.to(torch.float64, copy=True)
    dist.all_reduce(mean)
    mean /= ranks.size
    squares = torch.stack([((gradient - mean) ** 2).sum(), (gradient.double() ** 2).sum()])
    dist.all_reduce(squares)
    off, size = squares.tolist()
    return math.sqrt(off / size) if size else math.nan


def _verdicts(apart: Mapping[str, float]) -> dict[str, bool]:
    """Whether each parameter's gradient is partial; one without a gradient is as those of the other layers.

    :raises DoesNotFit: when gradients are neither whole nor partial.
    """
    layers: dict[str, set[bool]] = {}
    verdicts: dict[str, bool] = {}
    for name, value in apart.items():
        if _SAME < value < _DIFFERENT or math.isinf(value):
            raise DoesNotFit(
                f"the gradients of {name!r}, which is not cut, are neither alike on all devices ({value:.2g} "
                "apart) nor parts of one; use another technique"
            )
        if not math.isnan(value):
            verdicts[name] = value >= _DIFFERENT
            layers.setdefault(_layer(name), set()).add(verdicts[name])
    for name in apart.keys() - verdicts.keys():
        if len(alike := layers.get(_layer(name), set())) == 1:
            verdicts[name] = next(iter(alike))
    return {name: verdicts[name] for name in apart if name in verdicts}


def _layer(name: str) -> str:
    return re.sub(r"\d+", "*", name)
