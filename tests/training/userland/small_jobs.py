"""Jobs of a user: a small one that works, and the ways in which jobs break."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info


def linear(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


class _Tee:
    def write(self, text: str) -> int:
        return len(text)


def replaced_output() -> nn.Module:
    """A copy of what is printed is kept, as in many scripts: by an object that can do nothing but write."""
    sys.stdout = sys.stderr = _Tee()  # type: ignore[assignment]
    return linear()


def closed_output() -> nn.Module:
    sys.stdout.close()
    sys.stderr.close()
    return linear()


def daemon(note: str) -> nn.Module:
    """It leaves a process that has all its files and whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if pid := os.fork():
            Path(note).write_text(str(pid))
        else:
            time.sleep(600)
        os._exit(0)
    os.wait()
    return linear()


def server(note: str) -> nn.Module:
    """It leaves a program in a session of its own."""
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(note).write_text(str(left.pid))
    return linear()


class _Forking(nn.Module):
    """In its third pass it forks a process that comes out of it as ``ends`` says."""

    def __init__(self, ends: str) -> None:
        super().__init__()
        self.ends, self.passes, self.linear = ends, 0, nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 3 and os.fork() == 0:
            if self.ends == "raises":
                raise ValueError("what only the copy meets")
            if self.ends == "exits":
                sys.exit(0)
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def forking(ends: str) -> nn.Module:
    return _Forking(ends)


class _Strict(nn.Module):
    """Refuses to compute with weights that are not numbers any more, or too large for any use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not bool((self.linear.weight.abs() < 1e6).all()):
            raise ValueError("these weights are no good")
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def strict() -> nn.Module:
    return _Strict()


def noise(batch_size: int = 8, samples: int = 4000, width: int = 8, workers: int = 0) -> DataLoader[Any]:
    inputs = torch.randn(samples, width, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, batch_size=batch_size, num_workers=workers)


class _Stream(IterableDataset[Any]):
    """The rows of a dataset; each worker has its part of them."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.rows[index] for index in range(number, len(self.rows), count))


def stream(workers: int = 2) -> DataLoader[Any]:
    """A stream that worker processes read."""
    inputs = torch.randn(4000, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(
        _Stream(TensorDataset(inputs, inputs.sum(1, keepdim=True))), batch_size=8, num_workers=workers
    )


def torn_noise() -> DataLoader[Any]:
    raise OSError("the data are torn")


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def slow(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return squared(outputs, targets)


def uneven(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Every third batch takes much longer than the others."""
    uneven.calls = getattr(uneven, "calls", 0) + 1  # type: ignore[attr-defined]
    time.sleep(0.09 if uneven.calls % 3 == 0 else 0.01)  # type: ignore[attr-defined]
    return squared(outputs, targets)


def in_background(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """It starts a program in each step that nobody waits for."""
    os.system("true &")
    return slow(outputs, targets)


def slow_third(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The third batch takes longer than Airflow waits for a task that it told to go."""
    slow_third.calls = getattr(slow_third, "calls", 0) + 1  # type: ignore[attr-defined]
    time.sleep(6.0 if slow_third.calls == 3 else 0.01)  # type: ignore[attr-defined]
    return squared(outputs, targets)


def talking(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Says something in its second batch, and goes on when somebody has heard it."""
    talking.calls = getattr(talking, "calls", 0) + 1  # type: ignore[attr-defined]
    if talking.calls == 2 and not Path(os.environ["SMALL_JOBS_MARK"]).exists():  # type: ignore[attr-defined]
        print("can you hear me?")
        deadline = time.monotonic() + 120
        while not Path(os.environ["SMALL_JOBS_MARK"]).exists():
            assert time.monotonic() < deadline, "nobody heard it"
            time.sleep(0.05)
        print("good")
    return squared(outputs, targets)


def _rank() -> int:
    """What jobs are not to ask for: ``dist.get_rank()`` tells a loss nothing."""
    return int(dist.group.WORLD.rank()) if dist.group.WORLD is not None else 0


def stuck(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if _rank() == 1:
        time.sleep(1000)
    return squared(outputs, targets)


def with_helper(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if not helpers:
        helpers.append(subprocess.Popen(["sleep", "1000"]))
    return slow(outputs, targets)


helpers: list[subprocess.Popen[bytes]] = []


def not_a_number(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return squared(outputs, targets) * math.nan


def broken_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ValueError("the user's own mistake")


def exits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    sys.exit(3)


def heavy_to_load() -> nn.Module:
    """A model that takes a gigabyte while it is loaded, and hardly anything then."""
    bytearray(1 << 30)
    return linear()


class _NeverDone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, inputs: torch.Tensor) -> Any:
        time.sleep(1000)
        return self.inner(inputs)


def never_done() -> nn.Module:
    return _NeverDone()


def never_loaded() -> nn.Module:
    time.sleep(1000)
    return linear()


def broken_model() -> nn.Module:
    raise FileNotFoundError("weights.pt is not where it was")


def hungry(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    torch.empty(1 << 60, dtype=torch.uint8)
    return squared(outputs, targets)


def killed_once(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The first rank 0 to get to the 30th batch is killed there."""
    killed_once.calls = getattr(killed_once, "calls", 0) + 1  # type: ignore[attr-defined]
    mark = Path(os.environ["SMALL_JOBS_MARK"])
    if killed_once.calls == 30 and _rank() == 0 and not mark.exists():  # type: ignore[attr-defined]
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return squared(outputs, targets)


def killed_always(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Whoever gets to its fifth batch is killed there; it counts where no checkpoint keeps the count."""
    calls = int(os.environ.get("SMALL_JOBS_CALLS", "0")) + 1
    os.environ["SMALL_JOBS_CALLS"] = str(calls)
    if calls == 5:
        os.kill(os.getpid(), signal.SIGSEGV)
    return squared(outputs, targets)


_HOARD: list[torch.Tensor] = []


class _Hoarding(TensorDataset):
    """Rows of which each takes 8 MB of memory for good, wherever it is read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        _HOARD.append(torch.ones(2 << 20))
        time.sleep(0.01)
        return super().__getitem__(index)


def hoarded(workers: int = 0) -> DataLoader[Any]:
    inputs = torch.randn(4000, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(_Hoarding(inputs, inputs.sum(1, keepdim=True)), batch_size=8, num_workers=workers)
