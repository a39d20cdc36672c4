"""Gathering weights of FSDP's units in the format that they are computed in, with nothing different for it.

Under autocast a float32 weight of a matrix product is gathered and then cast; cast before, half as much
travels. torch's policy of mixed precision would cast all weights of a unit, those of norms too, which
autocast computes with as they are. So each unit is watched in its first pass, as blocks that spill are
(``narrow_weights.py``), and only what it casts anyway is cast before. Gradients of those come in that format,
and are added up over micro-batches and ranks in the weights' own, as they are without this: losses are the
same to the last bit.

What is not public of FSDP (seen in torch 2.13): a parameter's ``param_dtype``, and how gradients wait to be
reduced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from saturn_airflow.parallelism.narrow_weights import WithoutHooks, autocast_dtype, narrow_weights
from saturn_airflow.parallelism.recomputation import Compute
from saturn_airflow.training.ranks import Ranks


class NarrowGathers:
    """The gathers of ``units``, to which ``fully_shard`` was applied.

    :ivar parameters: what travels cast, as FSDP describes it.
    """

    def __init__(self, units: Sequence[nn.Module], ranks: Ranks) -> None:
        self.parameters: set[Any] = set()
        self._units = units
        self._ranks = ranks
        self._found: dict[int, list[bool]] = {}
        self._called: set[int] = set()  # in this forward pass
        self._agreed = not units
        self._lower: torch.dtype | None = None
        self._has_lowered = False
        for index, unit in enumerate(units):
            if unit._compiled_call_impl is None:
                unit.forward = self._watched(index, unit, unit.forward)

    def begin(self) -> None:
        """Before a forward pass of all units: gather in the format that it computes in."""
        self._called.clear()
        lower = autocast_dtype(self._ranks.device.type)
        self._has_lowered = self._has_lowered or lower is not None
        if lower == self._lower or not self.parameters:
            return
        self._lower = lower
        for unit in self._units:
            unit.reshard()  # type: ignore[operator]
        for parameter in self.parameters:
            parameter.param_dtype = lower
            parameter.reduce_dtype = parameter.orig_dtype
            # Where gathered weights were; they are made anew.
            parameter.all_gather_outputs = []
            if hasattr(parameter, "_unsharded_param"):
                del parameter._unsharded_param

    def before_reduction(self, group: Any) -> None:
        """Bring gradients of ``group`` into the format of the others, before they are reduced or kept."""
        for parameter in group.fsdp_params:
            if parameter not in self.parameters or not hasattr(parameter, "_unsharded_param"):
                continue
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
            weight = parameter.unsharded_param
            if group.reduce_grads and weight.requires_grad and parameter.unsharded_accumulated_grad is None:
                # There was none, which FSDP sends as zeros.
                zeros = torch.zeros_like(weight, dtype=parameter.orig_dtype)
                parameter.unsharded_accumulated_grad = zeros

    def agree(self) -> None:
        """After a step: use from the next on what all ranks have found. All ranks call this together."""
        if self._agreed or not self._has_lowered:
            return
        self._agreed = True
        everyones = self._ranks.everyones(self._found)
        for index, unit in enumerate(self._units):
            seen = [found[index] for found in everyones if index in found]
            narrow = list(map(all, zip(*seen, strict=True)))
            named = dict(unit.named_parameters())
            chosen = {id(p) for p, is_narrow in zip(named.values(), narrow, strict=False) if is_narrow}
            groups = unit._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
            self.parameters |= {
                p for group in groups for p in group.fsdp_params if id(p.sharded_param) in chosen
            }

    def _watched(self, index: int, unit: nn.Module, own: Compute) -> Compute:
        names = [name for name, _ in unit.named_parameters()]

        def variant(narrow: Sequence[bool], look: Callable[[Any], object], lower: torch.dtype) -> Compute:
            def compute(*args: Any, **kwargs: Any) -> Any:
                # Detached, they are none of those whose casts autocast keeps for the pass that follows.
                there = [dict(unit.named_parameters())[name].detach() for name in names]
                weights = [w.to(lower) if n else w for w, n in zip(there, narrow, strict=True)]
                look(weights)
                given = {f"block.{name}": w for name, w in zip(names, weights, strict=True)}
                return functional_call(WithoutHooks(unit, own), given, args, kwargs)

            return compute

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            lower = autocast_dtype(self._ranks.device.type)
            looks = index not in self._found or index in self._called
            self._called.add(index)
            if looks and not self._agreed and torch.is_grad_enabled():
                # A unit may be called several times: what one of its calls does not cast comes as it is.
                narrow = self._found.get(index, [True] * len(names))
                if lower is None:
                    narrow = [False] * len(names)
                elif any(narrow):
                    of = functools.partial(variant, lower=lower)
                    casts = narrow_weights(str(index), unit, len(names), lower, of, args, kwargs)
                    narrow = [one and other for one, other in zip(narrow, casts, strict=True)]
                self._found[index] = narrow
            return own(*args, **kwargs)

        return forward
