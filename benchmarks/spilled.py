"""How well spilling hides its transfers, without a GPU: `python benchmarks/spilled.py`.

The device is emulated: what it computes, what goes over its link each way, and the optimizer's way through
the host's memory take seconds by a rate, in which this process sleeps; the device holds so many bytes of
weights and no more. Blocks, gradients, steps and waits are real.

A step is held against a model of it: a pass takes as long as what it needs most of, be it the device, the
link one way (both ways at once), or the host's memory for the optimizer. That is stepping beside the backward
pass; where gradients are clipped by the norm of all, it is beside the next forward pass. The model knows no
time to fill a pipeline and to empty it, which is about one block in all. ``overlap`` is the part of the
shorter of transfers and compute that the other hides: (both alone - together) / the shorter alone. Of each,
the fastest step counts: a busy machine only adds to it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from machine import describe
from torch import nn

from saturn_airflow import Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.parallelism.transfers import Lane
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

AIM = 0.9
BLOCKS, RESIDENT, WIDTH = 24, 2, 64
WARMUPS = 3  # in which blocks are computed twice, to be compared, and the model is watched
HERE = Ranks(rank=0, size=1, device=torch.device("cpu"))


@dataclass(frozen=True)
class Case:
    """Seconds of a block: ``compute`` forward (three times that backward, where it is computed again),
    ``link`` of its weights or gradients one way, ``host`` of the optimizer's step."""

    name: str
    compute: float
    link: float
    host: float
    clipped: bool = False

    @property
    def model(self) -> float:
        """Seconds of a step in which each pass takes as long as what it needs most of."""
        forward, backward = [self.compute, self.link], [3 * self.compute, self.link]
        (forward if self.clipped else backward).append(self.host)
        return BLOCKS * (max(forward) + max(backward))


CASES = [
    Case("compute is longest", 0.020, 0.015, 0.030),
    Case("the link is longest", 0.010, 0.040, 0.020),
    Case("the optimizer is longest", 0.020, 0.015, 0.080),
    Case("all alike", 0.020, 0.020, 0.060),
    Case("all alike, clipped", 0.020, 0.020, 0.060, clipped=True),
    Case("compute is longest, clipped", 0.020, 0.015, 0.015, clipped=True),
]


class SlowDevice:
    """Transfers over a link that takes ``seconds`` for ``block_bytes`` each way, to a device that holds no
    more than ``cap`` bytes of what it was sent."""

    staged = True

    def __init__(self, seconds: float, block_bytes: int, cap: int) -> None:
        self._seconds_per_byte = seconds / block_bytes
        self._cap = cap
        self._held = 0
        self.most = 0
        lines = ("to device", "to host", "in", "out")
        self._lines = {line: ThreadPoolExecutor(1, line) for line in lines}

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def to_device(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        copies = [self._room(source) for source in sources]
        return copies, self._lines["to device"].submit(self._copy, sources, copies)

    def to_host(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Any:
        return self._lines["to host"].submit(self._copy, sources, targets)

    def compute_after(self, ticket: Future[None], copies: Sequence[torch.Tensor]) -> None:
        ticket.result()

    def wait(self, ticket: Future[None] | None) -> None:
        if ticket is not None:
            ticket.result()

    def computed(self) -> None:
        """This thread is the device: what it was asked to compute is computed."""

    def begin(self, lane: Lane, work: Callable[[], Any]) -> Any:
        return self._lines[lane].submit(work)

    def close(self) -> None:
        for line in self._lines.values():
            line.shutdown()

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        memory = numpy.empty(like.nbytes, dtype=numpy.uint8)
        self._held += like.nbytes
        self.most = max(self.most, self._held)
        if self._held > self._cap:
            raise torch.OutOfMemoryError(f"the device holds {self._cap} bytes")
        weakref.finalize(memory, self._give_back, like.nbytes)
        return torch.from_numpy(memory).view(like.dtype).view(like.shape)

    def _give_back(self, size: int) -> None:
        self._held -= size

    @torch.no_grad()
    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        time.sleep(self._seconds_per_byte * sum(source.nbytes for source in sources))
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


class Sleep(torch.autograd.Function):
    """What it is given, after ``seconds``, and its gradient after twice as many."""

    @staticmethod
    def forward(ctx: Any, seconds: float, x: torch.Tensor) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        time.sleep(2 * ctx.seconds)
        return None, gradient


class Block(nn.Module):
    """A residual layer that takes ``seconds`` to compute."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # First, so that it is computed again: what nothing is kept of is not.
        slow: torch.Tensor = Sleep.apply(self.seconds, x)  # type: ignore[no-untyped-call]
        return x + torch.tanh(self.linear(slow)) / BLOCKS


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (outputs - targets).square().mean()


def slow_step(seconds_per_parameter: float) -> Any:
    """AdamW's step, which takes so long for each number that it updates."""
    step = torch.optim.AdamW.step

    def slowly(self: torch.optim.AdamW) -> Any:
        numbers = sum(p.numel() for group in self.param_groups for p in group["params"] if p.grad is not None)
        time.sleep(seconds_per_parameter * numbers)
        return step(self)

    return slowly


def measured(case: Case, steps: int, spill: bool = True) -> tuple[float, list[float], float]:
    """The seconds of the fastest step, the losses, and the most blocks that were on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(case.compute) for _ in range(BLOCKS)))
    block_bytes = sum(p.nbytes for p in model[0].parameters())
    numbers = sum(p.numel() for p in model[0].parameters())
    device = SlowDevice(case.link, block_bytes, (RESIDENT + 1) * block_bytes)
    parallel = Spilled(model, HERE, RESIDENT, None, transfers=device) if spill else Parallel(model, HERE)
    objective = Objective(Job("slow", "x:y", "x:y", "spilled:mean_square"), model, HERE.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = [torch.randn(4, WIDTH), torch.randn(4, WIDTH)]
    seconds, losses = [], []
    plainly = torch.optim.AdamW.step
    torch.optim.AdamW.step = slow_step(case.host / numbers)  # type: ignore[method-assign]
    try:
        for _ in range(WARMUPS + steps):
            began = time.perf_counter()
            if not case.clipped:
                parallel.step_beside(optimizer)
            objective.begin(4)
            total, _ = parallel.backward(objective, batch, 4, 1 / 4, last=True)
            parallel.finish_gradients()
            if case.clipped:
                parallel.step_later(optimizer)
                parallel.clip_gradients(1.0)
            optimizer.step()
            parallel.drop_gradients()
            seconds.append(time.perf_counter() - began)
            losses.append(float(total))
        parallel.complete_steps()
    finally:
        torch.optim.AdamW.step = plainly  # type: ignore[method-assign]
        device.close()
    return min(seconds[WARMUPS:]), losses, device.most / block_bytes


def overlap(one: float, other: float, together: float) -> float:
    """The part of the shorter that the longer hides."""
    return (one + other - together) / min(one, other)


def row(case: Case, steps: int) -> dict[str, Any]:
    """What was measured of one case."""
    took, losses, most = measured(case, steps)
    computing, _, _ = measured(replace(case, link=0.0, host=0.0), steps)
    moving, _, _ = measured(replace(case, compute=0.0, host=0.0), steps)
    both, _, _ = measured(replace(case, host=0.0), steps)
    _, plain, _ = measured(replace(case, compute=0.0, host=0.0), steps, spill=False)
    return {
        **asdict(case),
        "seconds": took,
        "model_seconds": case.model,
        "compute_alone": computing,
        "transfers_alone": moving,
        "compute_and_transfers": both,
        "over_model": took / case.model - 1,
        "overlap": overlap(computing, moving, both),
        "blocks_on_device": most,
        "losses_as_in_memory": losses == plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Spilling on an emulated device.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        rows = []
        print(f"{'case':28} {'step':>8} {'model':>8} {'off':>6} {'overlap':>8} {'blocks':>7} same losses")
        for case in CASES:
            rows.append(found := row(case, arguments.steps))
            print(
                f"{case.name:28} {found['seconds']:7.3f}s {case.model:7.3f}s {found['over_model']:6.1%} "
                f"{found['overlap']:8.1%} {found['blocks_on_device']:7.1f} {found['losses_as_in_memory']}",
                flush=True,
            )
        dist.destroy_process_group()
    worst = min(found["overlap"] for found in rows)
    print(f"least overlap {worst:.1%}, aim {AIM:.0%}")
    if arguments.output:
        result = {"machine": describe(), "aim": AIM, "least_overlap": worst, "cases": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
