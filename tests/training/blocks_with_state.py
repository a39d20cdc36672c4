"""Models whose blocks hold state, share, drop and draw: what computing a block twice could get wrong."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils import parametrizations

WIDTH = 6


class Residual(nn.Module):
    """x plus what some layers make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layers(x))


class Average(nn.Module):
    """Subtracts a moving average that is kept in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.seen = torch.zeros(WIDTH)
        self.first = True
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            now = x.detach().mean(0)
            if self.how == "in place":
                self.mean.mul_(0.5).add_(now, alpha=0.5)
            elif self.how == "reassigned":
                self.mean = 0.5 * self.mean + 0.5 * now
            elif self.how == "data":
                self.mean.data.lerp_(now, 0.5)
            elif self.how == "attribute":
                self.seen = now if self.first else 0.5 * self.seen.to(x) + 0.5 * now
                self.first = False
        return self.linear(x - self.mean - self.seen.to(x))


class Remembers(nn.Module):
    """Keeps counters, a queue and a list in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.queue: deque[torch.Tensor] = deque(maxlen=3)
        self.by_kind: dict[str, list[float]] = {"scale": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.by_kind["scale"].append(1 / self.calls)
        out = self.linear(x) * sum(self.by_kind["scale"])
        for old in self.queue:
            out = out + 0.1 * old
        self.queue.append(x.detach().mean(0))
        return out


class Draws(nn.Module):
    """Drops by every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = random.random() + np.random.rand() + float(torch.rand((), generator=self.own))
        return self.dropout(self.linear(x)) * scale


class Experts(nn.Module):
    """Two experts, of which the batch's first number chooses one: the other gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.flatten()[0] > 0)](x)


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0]


class HalfFrozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self[0].weight.requires_grad_(False)
        self[2].bias.requires_grad_(False)


class Scalar(nn.Module):
    """A scalar and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class Cache:
    """An object of the user's own, which nobody can see into."""

    def __init__(self) -> None:
        self.seen: Any = 0


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cache = Cache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.seen = self.cache.seen + 1
        return self.linear(x) * self.cache.seen


class InPlace(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.add_(1.0))


class ClampsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


class DropsByRate(nn.Module):
    """Drops at a rate that is its own, and at one that it looks up elsewhere; adds noise that leaves no trace
    in the graph."""

    elsewhere = 0.2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rate = 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * torch.randn_like(x) if self.training else x
        x = dropout(self.linear(x), self.rate, self.training)
        return dropout(x, DropsByRate.elsewhere, self.training)


class GoesThroughTwice(nn.Module):
    """The mean of two passes through blocks in which ``switch`` has changed something meanwhile.

    :param switch: called with the blocks and whether all is to be as at first.
    """

    def __init__(self, switch: Callable[[Sequence[nn.Module], bool], object]) -> None:
        super().__init__()
        self.switch = switch
        self.stack = nn.Sequential(
            nn.Linear(4, WIDTH), *(Residual(DropsByRate()) for _ in range(2)), nn.Linear(WIDTH, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.stack(x)
        blocks = self.stack[1:-1]
        first = self.stack(x)
        self.switch(blocks, False)
        second = self.stack(x)
        self.switch(blocks, True)
        return (first + second) / 2


def _switch_rates(blocks: Sequence[nn.Module], back: bool) -> None:
    for module in [part for block in blocks for part in block.modules() if isinstance(part, DropsByRate)]:
        module.rate = 0.2 if back else 0.6


#: What changes of blocks between two passes, by name, and is as it was where they are computed again.
SWITCHES: dict[str, Callable[[Any, bool], object]] = {
    "modes": lambda blocks, back: blocks.train(back),
    "whether weights ask for gradients": lambda blocks, back: blocks.requires_grad_(back),
    "rates": _switch_rates,
}


def switch_elsewhere(blocks: Sequence[nn.Module], back: bool) -> None:
    """Change what blocks read outside of themselves."""
    DropsByRate.elsewhere = 0.2 if back else 0.6


def linear(wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> nn.Module:
    return wrap(nn.Linear(WIDTH, WIDTH))


#: What blocks can be made of, by name. All of it trains exactly under every kind of re-computation.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "batch norm, no statistics": lambda: nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "spectral norm": lambda: linear(parametrizations.spectral_norm),
    "weight norm": lambda: linear(parametrizations.weight_norm),
    "orthogonal": lambda: linear(parametrizations.orthogonal),
    "old spectral norm": lambda: linear(nn.utils.spectral_norm),
    "old weight norm": lambda: linear(nn.utils.weight_norm),
    "average in place": lambda: Average("in place"),
    "average reassigned": lambda: Average("reassigned"),
    "average behind autograd's back": lambda: Average("data"),
    "average unregistered": lambda: Average("attribute"),
    "counters and queues": Remembers,
    "dropout": lambda: nn.Dropout(0.4),
    "generators": Draws,
    "experts": Experts,
    "tied": Tied,
    "recurrent": Recurrent,
    "half frozen": HalfFrozen,
    "scalar": Scalar,
}

#: What is refused, and the words that say why.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "cache": (Caching, "can't be computed again"),
    "input": (InPlace, "an input of block"),
    "weight": (ClampsItsWeight, "weight"),
}


def model(names: list[str], depth: int = 3, frozen: bool = False) -> nn.Module:
    """A stack of blocks of these layers, in float64, between two linear layers."""
    torch.manual_seed(0)
    blocks = [
        Residual(*((LAYERS | {k: v for k, (v, _) in REFUSED.items()})[n]() for n in names))
        for _ in range(depth)
    ]
    if frozen:
        blocks[0].requires_grad_(False)
    return nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 3)).double()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets)
