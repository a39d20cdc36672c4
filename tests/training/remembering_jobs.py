"""Models, losses and data whose steps depend on those before in more ways than by weights and buffers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR


class SaysItsState(nn.Module):
    """What it keeps nobody can see, but it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 1)
        self.hidden = iter(range(100))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.plain(x) * (1 + next(self.hidden) / 50)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        self.hidden = iter(range(self.calls, 100))


def says_its_state() -> nn.Module:
    torch.manual_seed(1)
    return SaysItsState()


class Counts(nn.Module):
    """It counts for all of its kind."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            type(self).calls += 1
        return self.plain(x) * (1 + Counts.calls / 50)


def counts() -> nn.Module:
    torch.manual_seed(1)
    return Counts()


def line() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


CALLS = 0
HISTORY: deque[float] = deque(maxlen=3)
RNG = np.random.default_rng(1)


def counting_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    HISTORY.append(CALLS)
    return mse_loss(outputs, targets) * (1 + sum(HISTORY) / 100 + RNG.random())


TEACHER: nn.Module | None = None


def made_late(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that makes a module with its first batch."""
    global TEACHER
    if TEACHER is None:
        TEACHER = nn.Linear(1, 1, bias=False, dtype=outputs.dtype).requires_grad_(False)
        nn.init.constant_(TEACHER.weight, 0.5)
    return mse_loss(outputs, targets) + mse_loss(outputs, TEACHER(outputs.detach()))


class Centered(nn.Module):
    """A loss with a moving average, as of self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))
        self.calls = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = mse_loss(outputs - self.center, targets) * (1 + self.calls / 50)
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * outputs.mean()
        return loss


centered = Centered()


class Scheduled:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.weight, self.inner = 1.0, nn.MSELoss()

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.weight *= 1.1
        return self.inner(outputs, targets) * self.weight


scheduled = Scheduled()


class Shuffled:
    """It shuffles by an epoch, and by a generator, that it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0
        self.random = random.Random(5)
        self.data = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        order = list(range(12))
        self.random.shuffle(order)
        for start in range(0, 12, 3):
            x = self.data[order[start : start + 3]]
            yield x, x.sum(1, keepdim=True) * self.epoch


def shuffled() -> Shuffled:
    return Shuffled()


NOISE = np.random.default_rng(2)
READ = {"batches": 0}


class Noisy(Shuffled):
    """It draws from a generator, and counts, beside the model in one and the same file."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            READ["batches"] += 1
            yield x + float(NOISE.random()) * READ["batches"] / 10, y


def noisy() -> Noisy:
    return Noisy()


class CountsWithTheLoss(Shuffled):
    def __iter__(self) -> Iterator[Any]:
        global CALLS
        for x, y in super().__iter__():
            CALLS += 1
            yield x * (1 + CALLS / 100), y


def counts_with_the_loss() -> CountsWithTheLoss:
    return CountsWithTheLoss()


class Iterates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 1)
        self.steps = (0.1 * step for step in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) * (1 + next(self.steps))


class NotesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 1)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = SimpleNamespace(outputs=self.plain(x))
        return self.last.outputs


def iterates() -> nn.Module:
    return Iterates()


def notes_its_output() -> nn.Module:
    return NotesItsOutput()


STEPS = iter(range(100))


def iterating_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mse_loss(outputs, targets) * (1 + next(STEPS) / 50)


class KeepsOwn(nn.Module):
    """
    :param make: makes what counts.
    :param how: where it is kept.
    """

    def __init__(self, make: Callable[[int], Any], how: str) -> None:
        super().__init__()
        self.line, self.make, self.how = nn.Linear(4, 1), make, how
        self.kept: Any = {"list": [], "mapping": {}, "object": make(0), "none": None}[how]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        count = self._count()
        if self.how == "list":
            self.kept.append(self.make(count + 1))
        elif self.how == "mapping":
            self.kept["last"] = self.make(count + 1)
        elif self.how == "object":
            self.kept.count += 1
        else:
            self.kept = self.make(count + 1)
        outputs: torch.Tensor = self.line(inputs) * (1 + count / 10)
        return outputs

    def _count(self) -> int:
        last = self.kept
        if self.how == "list":
            last = self.kept[-1] if self.kept else None
        elif self.how == "mapping":
            last = self.kept.get("last")
        return 0 if last is None else int(last.count)


class Counted:
    """An object, not of a dataclass."""

    def __init__(self, count: int) -> None:
        self.count = count


def keeps_own(how: str, inside: bool = True) -> nn.Module:
    """Keeps objects of its own.

    :param inside: of a class that is defined inside a function.
    """

    class Local:
        def __init__(self, count: int) -> None:
            self.count = count

    return KeepsOwn(Local if inside else Counted, how)


FACTORS, FACTOR_CALLS, LOSS_CALLS = np.random.default_rng(3), 0, 0


def noting_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    global LOSS_CALLS
    LOSS_CALLS += 1
    return mse_loss(outputs, targets)


def _counted(step: int) -> float:
    global FACTOR_CALLS
    FACTOR_CALLS += 1
    return 1 - 0.05 * FACTOR_CALLS


def drawn_rate(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule by a generator of this module."""
    return LambdaLR(optimizer, lambda step: 0.5 + FACTORS.random())


def counted_rate(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule by how often it was asked."""
    return LambdaLR(optimizer, _counted)


def rate_by_losses(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule whose factors are by how often the loss was computed."""
    return MultiplicativeLR(optimizer, lambda step: 1 - 0.001 * LOSS_CALLS)


HARDNESS = [0.0]


def telling_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = mse_loss(outputs, targets)
    HARDNESS[0] = float(loss.detach())
    return loss


class Follows(Shuffled):
    """Its batches follow the loss of the step before, where ``by`` is not 0."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x * (1 + self.by * HARDNESS[0]), y


def follows(by: float) -> Follows:
    return Follows(by)


class LooksAtData(nn.Module):
    """Looks at how many batches its data have given."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 1)
        nn.init.constant_(self.plain.weight, 0.5)
        nn.init.zeros_(self.plain.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) * (1 + sum(GIVEN))


GIVEN: list[float] = []


class Gives(Shuffled):
    """Notes what it gives, for the model."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            GIVEN.append(0.1)
            yield x, y


def looks_at_data() -> nn.Module:
    return LooksAtData()


def gives() -> Gives:
    return Gives()


class Both:
    """What data and model hold together."""

    def __init__(self) -> None:
        self.count, self.sizes = 0, [0.0]


class HoldsBoth(LooksAtData):
    def __init__(self, both: Both) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) * (1 + self.both.count / 10 + sum(self.both.sizes))


class CountsInBoth(Shuffled):
    def __init__(self, both: Both) -> None:
        super().__init__()
        self.both = both

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            self.both.count += 1
            self.both.sizes.append(0.01)
            yield x, y


BOTH: list[Both] = []


def holds_both() -> nn.Module:
    BOTH[:] = [Both()]
    return HoldsBoth(BOTH[0])


def counts_in_both() -> CountsInBoth:
    return CountsInBoth(BOTH[0])
