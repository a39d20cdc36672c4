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


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"clip_grad_norm": 0.1}),
    ({"keep_gathered": True}, {"accumulate": 3}),
    ({"recompute": True}, {"accumulate": 2}),
    ({"offload": True}, {}),
]


def test_losses_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    requests = [
        TrainRequest(
            job=Job(
                "j",
                "test_narrow_gathers:blocks",
                "loop_jobs:points",
                "loop_jobs:loss",
                load_eval_dataloader="loop_jobs:points",
                hparams=HParams(precision="bf16", epochs=2, batch_size=6, lr=0.05, **hparams),
            ).to_dict(),
            technique="fsdp",
            parameters=parameters,
            folder=str(tmp_path / str(number)),
            checkpoint_batches=5,
        )
        for number, (parameters, hparams) in enumerate(CASES)
    ]
    found, _ = ranks_module.launch(both_ways, requests, size=2)
    for wide, narrow in zip(found[::2], found[1::2], strict=True):
        assert narrow[0] == wide[0]
        assert (wide[1], narrow[1]) == (0, 3 * 9)
        assert narrow[2] < 0.8 * wide[2]
