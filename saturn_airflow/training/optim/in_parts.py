"""An optimizer's step on some of its parameters, before the others have their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import optimizer as hooks

#: Torch's that update each number by its own gradient and state alone. What derives from them may not.
BY_NUMBER = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


class InParts:
    """The steps of ``optimizer``, taken part by part; its own ``step`` then takes that on the rest.

    Its state and the options of its groups are used as they are at each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of = {p: n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def __bool__(self) -> bool:
        """Whether such steps are to the last bit those on all parameters at once, in whichever thread."""
        hooked = (
            self.optimizer._optimizer_step_pre_hooks,
            self.optimizer._optimizer_step_post_hooks,
            hooks._global_optimizer_pre_hooks,
            hooks._global_optimizer_post_hooks,
        )
        step = vars(self.optimizer).get("step")
        known = type(self.optimizer) in BY_NUMBER and (
            step is None or hasattr(step, "_wrapped_by_lr_sched")  # torch's schedulers count steps by it
        )
        odd = any(group.get("differentiable") for group in self.optimizer.param_groups)
        return known and not odd and not any(hooked)

    def step_on(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the step on ``parameters``; those without a gradient stay as they are."""
        self.prepared(parameters)()

    def prepared(self, parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
        """What takes the step on ``parameters`` later, with the options that groups have now."""
        # Made anew for each step: schedulers change groups, and put a ``step`` of theirs into the optimizer.
        # It shares ``state`` with the optimizer, where what the step leaves is to be found.
        cls = type(self.optimizer)
        part = object.__new__(cls)
        part.__dict__.update(self.optimizer.__dict__)
        part.__dict__.pop("step", None)
        part.param_groups = [{**group, "params": []} for group in self.optimizer.param_groups]
        for parameter in parameters:
            if (number := self._group_of.get(parameter)) is not None:
                part.param_groups[number]["params"].append(parameter)
        part.param_groups = [group for group in part.param_groups if group["params"]]
        return lambda: cls.step(part)
