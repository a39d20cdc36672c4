"""A small training that saves checkpoints, for tests of what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from saturn_airflow.model.jobs import HParams
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.checkpoints import Checkpoints
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.own_state import OwnState
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.state import State, aliases


class Tied(nn.Module):
    """Tied weights, a buffer, a parameter without dimensions, a frozen one."""

    seen: torch.Tensor

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        outputs: torch.Tensor = self.head(self.embed(x) * self.scale + self.frozen)
        return outputs.logsumexp(-1).mean()


class Training:
    """A model and an optimizer that have done some steps."""

    def __init__(
        self, ranks: Ranks, steps: int, width: int = 3, optimizer: str = "torch.optim:AdamW"
    ) -> None:
        torch.manual_seed(steps)
        self.model = Tied(width)
        parallel = Parallel(self.model, ranks)
        hparams = HParams(optimizer=optimizer, lr=0.1)
        groups = optimizers.parameter_groups(hparams, self.model)
        self.optimizer = optimizers.make_optimizer(hparams, groups, parallel)
        self.groups = GroupState(self.optimizer)
        self.own = OwnState(self.optimizer)
        for _ in range(steps):
            self.model(torch.arange(5)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.state = State(parallel, self.optimizer, aliases(self.model), self.groups, self.own)

    def contents(self) -> dict[str, Any]:
        state = self.optimizer.state
        named = {f"{n}.{k}": v for n, p in self.model.named_parameters() for k, v in state.get(p, {}).items()}
        return {**self.model.state_dict(), **named}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class Folder:
    """Checkpoints in a folder, and what they warned of."""

    def __init__(self, path: Path, ranks: Ranks, keep: int = 2, beside: bool = False) -> None:
        self.path = path
        self.warnings: list[str] = []
        self.checkpoints = Checkpoints(path, ranks, keep, self.warnings.append, beside)

    def save(self, step: int, state: State, extra: dict[str, Any]) -> Path:
        written: list[Path] = []
        self.checkpoints.save(step, state, extra, lambda path, seconds: written.append(path))
        self.checkpoints.finish()
        return written[0]


def lay(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
