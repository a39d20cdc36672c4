"""Whether anybody but the optimizer changes what it steps on, around a step of it.

For optimizers whose steps can't be taken again on a few numbers, as Muon's and Adafactor's, which look at
whole matrices. Each of their steps is seen to begin with the options and the state of before, to be taken
once, and to be what is left of the weights afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from saturn_airflow.training.guarding.differences import Difference
from saturn_airflow.training.guarding.picked import is_plain, numbers_of, some_of
from saturn_airflow.training.optim import plain_values


class Untouched:
    """Watches the steps of ``optimizer``.

    :param names: of all parameters of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        self._begin()

    def _begin(self) -> None:
        self._inside = 0  # a class may call the step of another that it derives from
        self._called = False
        self._found: dict[str, str] = {}
        self._stepped: dict[nn.Parameter, torch.Tensor] = {}
        self._options = self._options_now()
        self._kept = [p for p in self._names if self._keeps(p)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a step, which may be taken in several calls on different parameters."""
        self._begin()
        before = self._optimizer.register_step_pre_hook(self._before)
        hooks = before, self._optimizer.register_step_post_hook(self._after)
        # What the job's own hooks of the optimizer change, lies between.
        own: Any = self._optimizer._optimizer_step_pre_hooks
        own.move_to_end(before.id, last=False)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def differences(self, step: int) -> list[Difference]:
        """What somebody else has changed, of those parameters that this rank has."""
        found = [Difference(f"{what} in step {step}", how, 1) for what, how in self._found.items()]
        own = list(self._stepped)
        left, now = numbers_of([list(self._stepped.values()), [some_of(p) for p in own]])
        for p, then, value in zip(own, left, now, strict=True):
            if not plain_values.equal_tensors(then, value):
                what = f"{self._names[p]!r} as step {step} of the optimizer leaves it"
                found.append(Difference(what, "is changed by somebody else", 4, float((then - value).norm())))
        return found

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._inside += 1
        if self._inside > 1:
            return
        if not self._called:
            self._called = True
            self._look_at_what_it_begins_with()
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in self._stepped and p.grad is not None:
                self._found[f"the optimizer's step on {self._names[p]!r}"] = "is taken more than once"

    def _look_at_what_it_begins_with(self) -> None:
        for given, now in zip(self._options, self._options_now(), strict=False):
            for key, value in given.items():
                if not plain_values.equal(value, now.get(key)):
                    self._found[f"the optimizer's {key!r}"] = f"is {now.get(key)!r} in the place of {value!r}"
        for p in self._kept:
            if not self._keeps(p):
                self._found[f"what the optimizer keeps of {self._names[p]!r}"] = "is gone"

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._inside -= 1
        if self._inside:
            return
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in self._names and is_plain(p):
                self._stepped[p] = some_of(p)

    def _keeps(self, parameter: nn.Parameter) -> bool:
        kept: Any = self._optimizer.state.get(parameter)
        return kept is not None and kept != {}

    def _options_now(self) -> list[dict[str, Any]]:
        """What each group says of what is an option of the class; optimizers count in others."""
        return [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key in self._optimizer.defaults
            }
            for group in self._optimizer.param_groups
        ]


def hooks_are_around(cls: type[torch.optim.Optimizer]) -> bool:
    """Whether hooks are called before and after all that a step of ``cls`` does: torch takes a step that was
    made to look like that of another class for one that calls them itself."""
    step: Any = cls.step
    return bool(getattr(step, "hooked", False)) and not getattr(step.__wrapped__, "hooked", False)
