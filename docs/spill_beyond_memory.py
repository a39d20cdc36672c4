"""Train a model whose weights are four times the memory of the device, with the technique ``spill``.

    python docs/spill_beyond_memory.py [--memory-mib 32]

On a CUDA GPU the memory that torch may take there is capped. On a CPU, the memory that the process may take
for itself is capped (RLIMIT_DATA), and what is spilled lies in files in a temporary folder, which do not
count. The same training without spilling then shows that the cap is real.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import tempfile
from pathlib import Path

import torch
from torch import nn

from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.training import ranks as launcher
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks

MIB = 2**20
BLOCKS = 32


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) / BLOCKS


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (outputs - targets).square().mean()


def train(technique: str, memory: int, folder: str, ranks: Ranks) -> tuple[int, list[float]]:
    """Train for ten steps in ``memory`` bytes; the bytes of the weights, and the losses."""
    device = ranks.device
    width = int((4 * memory / BLOCKS / 4) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    inputs = torch.randn(8, width)
    batch = [inputs, torch.tanh(inputs.flip(1))]
    objective = Objective(Job("capped", "x:y", "x:y", f"{Path(__file__).stem}:mean_square"), model, device)
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(memory / whole)
        files = None
    else:
        files = folder
    parallel = Spilled(model, ranks, 2, files) if technique == "spill" else Parallel(model.to(device), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0, foreach=False)
    if device.type == "cpu":
        cap_own_memory(memory, width, objective, ranks, folder)
    losses = []
    for _ in range(10):
        total, count = parallel.backward(objective, batch, 8, 1 / 8, last=True)
        parallel.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return weights, losses


def cap_own_memory(memory: int, width: int, objective: Objective, ranks: Ranks, folder: str) -> None:
    """Allow this process so many bytes on top of what it has now."""
    # What a first step sets up, and what malloc keeps for later, would blur the picture.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    x = torch.randn(8, width)
    small = Spilled(nn.Sequential(Block(width), Block(width)), ranks, 2, folder)
    small.backward(objective, [x, x], 8, 1 / 8, True)
    del small
    gc.collect()
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + memory, resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train four times what fits, by spilling.")
    parser.add_argument("--memory-mib", type=int, help="of the device; default: 32 on a CPU, 1024 on a GPU")
    on_gpu = torch.cuda.is_available()
    device_type = "cuda" if on_gpu else "cpu"
    memory = (parser.parse_args().memory_mib or (1024 if on_gpu else 32)) * MIB
    with tempfile.TemporaryDirectory() as folder:
        for technique in ("spill", "single"):
            arguments = (f"{Path(__file__).stem}:train", technique, memory, folder)
            try:
                ((weights, losses),) = launcher.launch(*arguments, size=1, device_type=device_type)
            except RanksFailedError as error:
                print(f"{technique}: {error.failure.status.replace('_', ' ')} in {memory / MIB:.0f} MiB")
                continue
            print(
                f"{technique}: {weights / MIB:.0f} MiB of weights trained in {memory / MIB:.0f} MiB; "
                f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
            )


if __name__ == "__main__":
    main()
