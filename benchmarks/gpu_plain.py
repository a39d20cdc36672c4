"""Plain loops of torch, which gpu.py holds Saturn against, and what the machine can do at all."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_jobs import data, loss
from torch import nn

from saturn_airflow.launch import host_memory
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.parallelism.blocks import find_blocks
from saturn_airflow.training.loading import load_model
from saturn_airflow.training.ranks import Ranks


class Phases:
    """How long the phases of steps take on the device, each from where it is marked to the next mark."""

    def __init__(self, device: torch.device, warmups: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._left = warmups
        self._marks: list[tuple[str, Any]] = []
        self._seconds: dict[str, list[float]] = {}

    def mark(self, name: str) -> None:
        """A phase begins; on a GPU once that gets there."""
        now: Any = time.perf_counter()
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        self._marks.append((name, now))

    def end_step(self) -> None:
        """The device has done all of a step."""
        self.mark("")
        marks, self._marks = self._marks, []
        if self._on_gpu:
            torch.cuda.synchronize()
        self._left -= 1
        if self._left >= 0:
            return
        found: dict[str, float] = {}
        for (name, began), (_, ended) in itertools.pairwise(marks):
            took = began.elapsed_time(ended) / 1000 if self._on_gpu else ended - began
            found[name] = found.get(name, 0.0) + took
        for name, took in found.items():
            self._seconds.setdefault(name, []).append(took)

    def means(self) -> dict[str, float]:
        """Seconds of a step, by phase."""
        return {name: statistics.fmean(seconds) for name, seconds in self._seconds.items()}


def cap_memory(cap: int | None, ranks: Ranks) -> None:
    """Let no more than ``cap`` bytes of the GPU be used."""
    if cap is not None and ranks.device.type == "cuda":
        whole = torch.cuda.get_device_properties(ranks.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / whole))


def train_plainly(request: TrainRequest, cap: int | None, ranks: Ranks) -> dict[str, Any]:
    """The loop that one writes by hand, on the same weights and batches: seconds per batch and losses."""
    cap_memory(cap, ranks)
    a_job, measure = request.job, request.measure
    assert measure is not None
    built, device = load_model(a_job), ranks.device
    if request.technique != "plain":
        # Not reentrant, as FSDP2 wants it; Saturn's is of the same kind.
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    if request.technique == "plain FSDP2, offloaded":
        shard_and_offload(built, device)
    else:
        built.to(device)
    built.train()
    hparams = a_job.hparams
    trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=hparams.lr, fused=True)
    assert hparams.batch_size is not None
    loader = data(batch_size=hparams.batch_size, **a_job.data_args)
    seconds: list[float] = []
    losses: list[float] = []
    phases = Phases(device, measure.warmups)
    batches = (batch for _ in iter(int, 1) for batch in loader)
    while len(seconds) < measure.warmups + measure.batches:
        began, noted = time.perf_counter(), torch.zeros((), device=device)
        whole = next(batches)
        for part in range(hparams.accumulate):
            mine = {name: rows.tensor_split(hparams.accumulate)[part] for name, rows in whole.items()}
            batch = {name: rows.to(device, non_blocking=True) for name, rows in mine.items()}
            phases.mark("forward")
            with torch.autocast(device.type, torch.bfloat16):
                outputs = built(input_ids=batch["input_ids"])
                value = loss(outputs, batch) / hparams.accumulate
            phases.mark("backward")
            value.backward()  # type: ignore[no-untyped-call]
            noted += value.detach()
        if hparams.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(built.parameters(), hparams.clip_grad_norm)
        phases.mark("optimizer")
        optimizer.step()
        phases.mark("rest")
        optimizer.zero_grad()
        losses.append(noted.item())  # a loss is looked at in every step
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        phases.end_step()
    counted = seconds[measure.warmups :]
    spread = statistics.quantiles(counted, n=4) if len(counted) > 1 else [0.0, 1.0, 0.0]
    return {
        "seconds_per_batch": statistics.fmean(counted),
        "spread": (spread[2] - spread[0]) / spread[1],
        "losses": losses,
        "phases": phases.means(),
    }


def shard_and_offload(built: Any, device: torch.device) -> None:
    """FSDP2 on one device: blocks come from the host, in bf16, one after the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for _, block in find_blocks(built):
        fully_shard(block, **options)
    fully_shard(built, **options)


def machine(ranks: Ranks) -> dict[str, Any]:
    """The device's name, its memory in bytes, and :func:`ceilings`."""
    if ranks.device.type != "cuda":
        memory = host_memory.available()
        return {"device": "cpu-dry-run", "device_bytes": memory, "ceilings": ceilings(ranks)}
    facts = torch.cuda.get_device_properties(ranks.device)
    return {"device": facts.name, "device_bytes": facts.total_memory, "ceilings": ceilings(ranks)}


def ceilings(ranks: Ranks) -> dict[str, float]:
    """What this machine does at best, in FLOP/s and bytes per second."""
    device, on_gpu = ranks.device, ranks.device.type == "cuda"

    def fastest(work: Callable[[], object], times: int = 5) -> float:
        seconds = []
        for _ in range(times + 1):
            began = time.perf_counter()
            work()
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:])

    n, size = (8192, 2**30) if on_gpu else (128, 2**20)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    other, there = torch.zeros_like(host), torch.zeros(size, dtype=torch.uint8, device=device)
    return {
        "bf16_flops": 2 * n**3 / fastest(lambda: a @ b),
        "to_device": size / fastest(lambda: there.copy_(host, non_blocking=True)),
        "to_host": size / fastest(lambda: host.copy_(there, non_blocking=True)),
        "in_host_memory": 2 * size / fastest(lambda: other.copy_(host)),
    }
