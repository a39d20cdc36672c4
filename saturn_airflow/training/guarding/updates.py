"""Whether the steps of an optimizer are those of its class, with the job's options.

Two ways to compute a gradient round otherwise, and Adam makes much of little, so weights after a step are
compared loosely. Here a few numbers of each parameter, with their gradients and what is kept of them, go
through a step of the class once more, beside the one that is taken: both must come to the same. So options
that are not the job's, state that is gone and weights that somebody else writes show, however little they
change. So are torch's optimizers that update each number by itself, as they come; around the steps of others
weights, options and state stay as these leave them (:mod:`untouched`). Parameters that no optimizer has stay
as they are under any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from saturn_airflow.training.guarding.differences import Difference
from saturn_airflow.training.guarding.picked import is_plain, numbers_of, part_here, some_of
from saturn_airflow.training.guarding.untouched import Untouched, hooks_are_around
from saturn_airflow.training.optim.group_state import GroupState, Values
from saturn_airflow.training.optim.in_parts import BY_NUMBER
from saturn_airflow.training.ranks import Ranks

# How far two kernels may be apart, as a share of a step, and in roundings of the weights.
_OF_STEP, _ROUNDINGS = 1e-4, 4.0


class Updates:
    """The steps of ``optimizer``, which has just been made or is as a checkpoint left it.

    :param groups: know its options as they should be.
    :param names: of all parameters of the model.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: GroupState, names: Mapping[nn.Parameter, str]
    ) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._names = names
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        step = vars(optimizer).get("step")
        as_it_comes = step is None or hasattr(step, "_wrapped_by_lr_sched")
        self._known = type(optimizer) in BY_NUMBER and as_it_comes and not hooked
        seen = as_it_comes and not self._known and hooks_are_around(type(optimizer))
        self._untouched = Untouched(optimizer, names) if seen else None
        self._kept: dict[nn.Parameter, dict[str, Any] | None] = {}
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._again: dict[nn.Parameter, tuple[int, nn.Parameter]] = {}
        self._left_out: set[nn.Parameter] = set()
        self._options: dict[str, tuple[Any, Any]] = {}
        self._given: Values = []
        self._called = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a step, which may be taken in several calls of the optimizer's."""
        self._before, self._again, self._left_out = {}, {}, set()
        self._called, self._options = False, {}
        # A step must begin with what the last one, or a checkpoint, has left.
        self._kept = {p: self._picked_state(p) for p in self._names if self._known}
        hook = self._optimizer.register_step_pre_hook(self._look)
        hooks: Any = self._optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(hook.id, last=False)  # hooks that somebody sets later may change gradients
        try:
            with self._untouched.watched() if self._untouched is not None else nullcontext():
                yield
        finally:
            hook.remove()

    def differences(self, step: int) -> list[Difference]:
        """What the step left otherwise, of those parameters that this rank has."""
        if not self._called:
            what = f"the optimizer's step {step}"
            return [Difference(what, "is not taken by its class", 1)] if self._known else []
        found = [] if self._untouched is None else self._untouched.differences(step)
        found += [
            Difference(f"the optimizer's {key!r} in step {step}", f"is {now!r} in the place of {given!r}", 1)
            for key, (given, now) in self._options.items()
        ]
        self._step_again()
        checked = [p for p in self._before if p not in self._left_out]
        wanted = [self._again[p][1].detach() if p in self._again else self._before[p] for p in checked]
        told = numbers_of([[self._before[p] for p in checked], wanted, [some_of(p) for p in checked]])
        for p, was, should, now in zip(checked, *told, strict=True):
            update, off = float((should - was).norm()), float((should - now).norm())
            rounding = _ROUNDINGS * torch.finfo(p.dtype).eps * float(should.norm())
            if not off <= _OF_STEP * update + rounding:
                what = f"what step {step} of the optimizer makes of {self._names[p]!r}"
                how = f"is off by {100 * off / update:.2g}% of it" if update else f"is off by {off:.2g}"
                if p not in self._again:
                    what, how = f"{self._names[p]!r}", f"changes in step {step}, which has no gradient of it"
                found.append(Difference(what, how, 4, off))
        return found

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note what the optimizer is about to step on."""
        numbered = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
        if not self._called:
            self._called, self._given = True, self._groups.expected() if self._known else []
            self._options = self._groups.otherwise() if self._known else {}
            for parameter in self._names:
                if is_plain(parameter):
                    self._before[parameter] = some_of(parameter)
        if not self._known:
            self._left_out.update(parameter for _, parameter in numbered)
            return
        for number, parameter in numbered:
            if parameter not in self._before or parameter.grad is None:
                continue
            kept = self._kept.get(parameter)
            if kept is None or not _is_alike(parameter, parameter.grad):
                self._left_out.add(parameter)
                continue
            again = nn.Parameter(self._before[parameter].clone())
            again.grad = some_of(parameter.grad)
            self._again[parameter] = (number, again)

    def _picked_state(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """What is kept of the numbers that are looked at; None where that can't be told."""
        picked: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim:
                if not _is_alike(parameter, value):
                    return None
                value = some_of(value)
            picked[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return picked

    def _step_again(self) -> None:
        """Take the step of the class on the numbers that were noted."""
        if not self._again:
            return
        cls = type(self._optimizer)
        other = object.__new__(cls)
        other.__dict__.update(self._optimizer.__dict__)
        other.__dict__.pop("step", None)
        other.param_groups = [{**options, "params": []} for options in self._given]
        other.state = defaultdict(dict)
        for parameter, (number, again) in self._again.items():
            other.param_groups[number]["params"].append(again)
            if kept := self._kept[parameter]:
                other.state[again] = kept
        other.param_groups = [group for group in other.param_groups if group["params"]]
        _without_hooks(cls)(other)


def watched(updates: Sequence[Updates]) -> ExitStack:
    """Around a step of all of them, see :meth:`Updates.watched`."""
    stack = ExitStack()
    for one in updates:
        stack.enter_context(one.watched())
    return stack


def everyones(updates: Sequence[Updates], step: int, ranks: Ranks) -> list[Difference]:
    """What :meth:`Updates.differences` tells on all ranks, which call this together."""
    own = [difference for one in updates for difference in one.differences(step)]
    return list(dict.fromkeys(difference for there in ranks.everyones(own) for difference in there))


def names_in(model: nn.Module, aliases: Mapping[str, str]) -> dict[nn.Parameter, str]:
    """The first names of the parameters of ``model``."""
    return {p: aliases.get(name, name) for name, p in model.named_parameters()}


def _without_hooks(cls: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """The step of ``cls`` without what torch calls before and after it, for all optimizers too."""
    step: Any = cls.step
    found: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


def _is_alike(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a number for each of ``parameter`` at the same place of this rank's part."""
    if isinstance(parameter, DTensor) and (
        not isinstance(tensor, DTensor) or tensor.placements != parameter.placements
    ):
        return False
    return is_plain(tensor) and part_here(tensor).shape == part_here(parameter).shape
