"""A model whose samples see each other from some step on, after the first spot check."""

from __future__ import annotations

import time

import torch
from torch import nn

#: The first spot check is made at step 10, the next at 100 or a while before.
AT = 20


class CoupledLate(nn.Module):
    """From then on its steps take a while, too: training can be told to stop before it is checked again."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls = self.calls + 1
        if int(self.calls) >= AT:
            time.sleep(0.05)
            x = x + x.mean(0)
        found: torch.Tensor = self.layer(x)
        return found
