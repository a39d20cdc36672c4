"""FSDP's gathers in bfloat16: they change nothing but what travels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism import sharding
from saturn_airflow.parallelism.narrow_gathers import NarrowGathers
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    """Weights that are cast, one that is used otherwise too, one that is frozen, one that is never used, and
    one that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)
        self.both = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never, self.seldom = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) + self.frozen(x)
        if (x[:, 0] > 0.5).any():
            x = x + self.seldom(x) * (x[:, :1] > 0.5)
        return x + self.both(x) * self.both.weight.mean()  # type: ignore[no-any-return]


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(3)), nn.Linear(8, 3))


class Twice(nn.Module):
    """It goes through its blocks twice: the second time some do not compute in bfloat16, and one of them
    only where a sample asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        some = x[:, :1] > 0.8
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.blocks[0](x)
        with torch.autocast(x.device.type, enabled=False):
            x = self.blocks[1](x.float())
        if some.any():
            x = torch.where(some, self.blocks[2](x), x)
        return self.last(x)  # type: ignore[no-any-return]


def both_ways(requests: list[TrainRequest], ranks: Ranks) -> list[Any]:
    """Of each training without and with them: its events, how many weights traveled cast, bytes gathered."""
    found = []
    agree, gather = NarrowGathers.agree, sharding._Gather.__call__
    for request in requests:
        for narrow in (False, True):
            events: list[Any] = []
            cast: list[int] = [0]
            bytes_gathered: list[int] = []

            def agreed(self: NarrowGathers, narrow: bool = narrow, cast: list[int] = cast) -> None:
                if narrow:
                    agree(self)
                cast[0] = len(self.parameters)

            def gathered(self: Any, *args: Any, into: list[int] = bytes_gathered, **kwargs: Any) -> Any:
                into.append(kwargs["input_tensor"].nbytes)
                return gather(self, *args, **kwargs)

            NarrowGathers.agree = agreed  # type: ignore[method-assign]
            sharding._Gather.__call__ = gathered  # type: ignore[method-assign]
            folder = f"{request.folder}-{narrow}"
            told = dataclasses.replace(ranks, _emit=events.append)
            train(dataclasses.replace(request, folder=folder), told)
            losses = [(e["event"], e.get("loss", e.get("eval_loss"))) for e in events if "step" in e]
            found.append((losses, cast[0], sum(bytes_gathered)))
    return found


# The second of three blocks does not compute in bfloat16 the second time.
ONCE, TWICE = ("blocks", range(3 * 9, 3 * 9 + 1)), ("Twice", range(9, 2 * 9 + 1))
CASES: list[tuple[tuple[str, range], dict[str, Any], dict[str, Any]]] = [
    (ONCE, {}, {"clip_grad_norm": 0.1}),
    (ONCE, {"keep_gathered": True}, {"accumulate": 3}),
    (ONCE, {"recompute": True}, {"accumulate": 2}),
    (ONCE, {"offload": True}, {}),
    (TWICE, {}, {"accumulate": 2}),
    (TWICE, {"keep_gathered": True}, {}),
]


def test_losses_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    requests = [
        TrainRequest(
            job=Job(
                "j",
                f"test_narrow_gathers:{model}",
                "loop_jobs:points",
                "loop_jobs:loss",
                load_eval_dataloader="loop_jobs:points",
                hparams=HParams(precision="bf16", epochs=2, batch_size=6, lr=0.05, **hparams),
            ),
            technique="fsdp",
            parameters=parameters,
            folder=str(tmp_path / str(number)),
            checkpoint_batches=5,
        )
        for number, ((model, _), parameters, hparams) in enumerate(CASES)
    ]
    found, _ = ranks_module.launch(both_ways, requests, size=2)
    for ((_, cast), *_), wide, narrow in zip(CASES, found[::2], found[1::2], strict=True):
        assert narrow[0] == wide[0]
        assert wide[1] == 0
        assert narrow[1] in cast
        assert narrow[2] < 0.9 * wide[2]
