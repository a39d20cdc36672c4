"""What one CUDA GPU makes of the techniques for one device; needs torch and transformers.

    python benchmarks/gpu.py                     # on a GPU: ten minutes at most, about 115 GiB of host memory
    python benchmarks/gpu.py --dry-run           # anywhere: tiny models, to see that it runs

It measures, in bf16,

* what the machine can do at all: products of matrices, copies to and from the GPU, copies in host memory;
* ``single`` on a GPT-2-like model of 1.5B parameters: tokens per second and model FLOPs utilisation (MFU),
  counted as in PaLM (Chowdhery et al., 2022, appendix B): recomputed activations count for nothing;
* a model of 6B parameters and one of Llama's shape under ``spill``, with the GPU's memory capped to 16 GiB,
  at several batch sizes, with and without clipping and accumulation;
* each phase of a step, as the device gets to it: forward, backward, optimizer, and the rest;
* each against a plain loop of torch, without Saturn, on the same weights and batches: in memory, in memory
  with re-computation, and FSDP2 with offloading at its best (fused Adam, bf16 gathers, re-computation); and,
  where it is installed, against DeepSpeed's ZeRO stage 3 with weights and optimizer on the host;
* how far losses are from the plain loop's at that size, and from those of float64 on a small model.

It prints a table and writes JSON, which names what there was no time for. The aims, on a GPU such as an H100:
50% MFU for ``single`` and 98% of the plain loop's speed; ``spill`` at 60% of the speed in memory and at 1.5
times that of FSDP2 with offloading.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_deepspeed import why_not
from gpu_jobs import Shape, job
from gpu_plain import Phases, cap_memory

from saturn_airflow.launch import launching
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.training.loop import train
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.ranks import Ranks

GIB = 2**30
# Dense bf16 FLOP/s from the vendors' data sheets, by a part of the device's name; the first that matches.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    shape: Shape
    technique: str
    parameters: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    cap: int | None = None  # bytes of the GPU's memory
    hparams: dict[str, Any] = field(default_factory=dict)
    against: str = ""  # the case whose losses these should be


#: What a plain loop does in the place of a technique.
PLAIN = ("plain", "plain, recomputed", "plain FSDP2, offloaded")
DEEPSPEED = "DeepSpeed, offloaded"


def train_capped(request: TrainRequest, cap: int | None, ranks: Ranks) -> dict[str, Any]:
    """Train with Saturn; what ``train`` returns, and the losses."""
    cap_memory(cap, ranks)
    losses: list[float] = []
    assert request.measure is not None
    phases = Phases(ranks.device, request.measure.warmups)
    with marked(phases):
        found = _train_and_note(request, losses, ranks, phases.end_step)
    return {**found, "losses": losses, "phases": phases.means()}


@contextmanager
def marked(phases: Phases) -> Iterator[None]:
    """Have a training mark its phases. Those of an optimizer that steps beside others are in theirs."""
    compute, take_step = Objective.__call__, optimizers.take_step

    def computed(self: Objective, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        phases.mark("forward")
        parts = compute(self, *given)
        phases.mark("backward")
        return parts

    def step(*given: Any) -> None:
        phases.mark("optimizer")
        take_step(*given)
        phases.mark("rest")

    changed: tuple[Any, Any] = (Objective, optimizers)
    changed[0].__call__, changed[1].take_step = computed, step
    try:
        yield
    finally:
        changed[0].__call__, changed[1].take_step = compute, take_step


def _train_and_note(
    request: TrainRequest, losses: list[float], ranks: Ranks, stepped: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    def note(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            losses.append(event["loss"])
            stepped()

    return train(request, dataclasses.replace(ranks, _emit=note))


def losses_of(requests: Sequence[TrainRequest], ranks: Ranks) -> list[list[float]]:
    """The losses of short trainings, one after the other."""
    found = []
    for request in requests:
        losses: list[float] = []
        _train_and_note(request, losses, ranks)
        found.append(losses)
    return found


def measure(case: Case, device_type: str, peak_flops: float | None) -> dict[str, Any]:
    """Run one case in a process of its own."""
    precise = job(case.shape, precision="bf16", compile=case.compile, **case.hparams)
    request = TrainRequest(
        job=precise.to_dict(),
        technique=case.technique,
        parameters=case.parameters,
        measure=Measure(warmups=2, batches=5, seconds=60.0) if device_type == "cuda" else Measure(1, 2),
    )
    row: dict[str, Any] = {
        "case": case.name,
        "technique": case.technique,
        "parameters": case.parameters,
        "compile": case.compile,
        "model_parameters": case.shape.parameters,
        "batch": [case.shape.batch_size, case.shape.tokens],
        **case.hparams,
        "cap_gib": case.cap / GIB if case.cap else None,
    }
    function = "gpu_plain:train_plainly" if case.technique in PLAIN else "gpu:train_capped"
    if case.technique == DEEPSPEED:
        if why := why_not(device_type):
            return {**row, "failed": "left out", "why": why}
        function = "gpu_deepspeed:train_with_deepspeed"
    call = launching.pack(function, request, case.cap)
    threads = len(os.sched_getaffinity(0)) if device_type == "cuda" else 1
    try:
        (rank,) = launching.launch_ranks(call, 1, device_type=device_type, threads=threads)
    except RanksFailedError as error:  # the others are measured all the same
        return {**row, "failed": error.failure.status, "why": error.failure.reason[:300]}
    seconds = rank["value"]["seconds_per_batch"]
    tokens_per_second = case.shape.batch_size * case.shape.tokens / seconds
    return {
        **row,
        "seconds_per_batch": seconds,
        "spread": rank["value"]["spread"],
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * case.shape.flops_per_token / peak_flops if peak_flops else None,
        "peak_device_gib": rank["peak_device_bytes"] / GIB,
        "peak_host_gib": rank["peak_host_bytes"] / GIB,
        "losses": rank["value"]["losses"],
        "phases": rank["value"]["phases"],
    }


def deviations(shape: Shape, device_type: str) -> list[dict[str, Any]]:
    """How far the losses of ten steps are from those that float64 gives on the CPU."""
    variants = [(t, p) for p in ("float64", "float32", "bf16") for t in ("single", "spill", "fsdp")]
    with tempfile.TemporaryDirectory() as folder:
        requests = [
            TrainRequest(
                job=job(shape, precision=precision, batches=10).to_dict(),
                technique=technique,
                folder=f"{folder}/{technique}-{precision}",
                checkpoint_seconds=None,
            )
            for technique, precision in variants
        ]
        reference = TrainRequest(job=requests[0].job, technique="single", folder=f"{folder}/cpu")
        (exact,) = launch_losses([reference], "cpu")
        found = launch_losses(requests, device_type)
    return [
        {
            "technique": technique,
            "precision": precision,
            "worst": max(abs(a - b) for a, b in zip(losses, exact, strict=True)),
        }
        for (technique, precision), losses in zip(variants, found, strict=True)
    ]


def launch_losses(requests: Sequence[TrainRequest], device_type: str) -> list[list[float]]:
    """:func:`losses_of`, in a process of its own."""
    call = launching.pack("gpu:losses_of", list(requests))
    (rank,) = launching.launch_ranks(call, 1, device_type=device_type)
    value: list[list[float]] = rank["value"]
    return value


def cases(dry_run: bool, batch_size: int, spill_batch_size: int) -> list[Case]:
    """What is measured, what matters most first."""
    if dry_run:
        small = Shape(layers=3, width=32, heads=2, vocabulary=64, tokens=16, batch_size=4)
        large = Shape(layers=6, width=32, heads=2, vocabulary=64, tokens=16, batch_size=4)
        llama = Shape(layers=3, width=32, heads=2, vocabulary=64, tokens=16, batch_size=4, inner=88)
        sizes = [2]
    else:
        small = Shape(layers=48, width=1600, heads=25, vocabulary=50304, tokens=1024, batch_size=batch_size)
        large = Shape(
            layers=30, width=4096, heads=32, vocabulary=16384, tokens=1024, batch_size=spill_batch_size
        )
        llama = Shape(
            layers=24,
            width=4096,
            heads=32,
            vocabulary=16384,
            tokens=1024,
            batch_size=spill_batch_size,
            inner=11008,
        )
        sizes = [4, 8, 24]
    cap, memory = 16 * GIB, "6B, plain, recomputed"
    longer = dataclasses.replace(large, batch_size=large.batch_size * 4 // 3)
    clipped, longest = "6B, spill, clipped, longer batch", "6B, plain, recomputed, clipped, longer batch"
    clips, accumulates = {"clip_grad_norm": 1.0}, {"accumulate": 2}
    return [
        Case("1.5B, plain", small, "plain"),
        Case("1.5B, single", small, "single", against="1.5B, plain"),
        Case(memory, large, "plain, recomputed"),
        Case("6B, spill", large, "spill", {"resident": 2}, cap=cap, against=memory),
        Case("6B, plain FSDP2, offloaded", large, "plain FSDP2, offloaded", cap=cap, against=memory),
        Case(clipped, longer, "spill", cap=cap, hparams=clips, against=longest),
        Case(longest, longer, "plain, recomputed", hparams=clips),
        Case("1.5B, single, compiled", small, "single", compile=True, against="1.5B, plain"),
        Case("Llama, plain, recomputed", llama, "plain, recomputed"),
        Case("Llama, spill", llama, "spill", cap=cap, against="Llama, plain, recomputed"),
        *(
            Case(
                f"6B, spill, batches of {size}", dataclasses.replace(large, batch_size=size), "spill", cap=cap
            )
            for size in sizes
        ),
        Case("6B, DeepSpeed, offloaded", large, DEEPSPEED, cap=cap, against=memory),
        Case("6B, spill, accumulated", large, "spill", cap=cap, hparams=accumulates),
        Case("6B, single, recomputed", large, "single", {"recompute": True}, against=memory),
    ]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The cases, one line each."""
    print(
        f"{'case':28} {'s/batch':>9} {'tokens/s':>10} {'MFU':>6} {'GPU GiB':>8} {'host GiB':>9}  "
        "seconds by phase"
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['case']:28} {row['failed']}: {row['why'][:70]}")
            continue
        mfu = f"{row['mfu']:6.1%}" if row["mfu"] else "     -"
        print(
            f"{row['case']:28} {row['seconds_per_batch']:9.4f} {row['tokens_per_second']:10,.0f} {mfu} "
            f"{row['peak_device_gib']:8.2f} {row['peak_host_gib']:9.2f}  "
            + ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["phases"].items())
        )


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many times as fast Saturn is as plain loops."""
    speed = {row["case"]: row["tokens_per_second"] for row in rows if "failed" not in row}
    pairs = [
        ("1.5B, single", "1.5B, plain"),
        ("6B, spill", "6B, plain, recomputed"),
        ("6B, spill", "6B, plain FSDP2, offloaded"),
        ("6B, spill", "6B, DeepSpeed, offloaded"),
        ("6B, spill, clipped, longer batch", "6B, plain, recomputed, clipped, longer batch"),
        ("Llama, spill", "Llama, plain, recomputed"),
    ]
    return {f"{a} / {b}": speed[a] / speed[b] for a, b in pairs if a in speed and b in speed}


def compare_losses(rows: Sequence[dict[str, Any]], measured: Sequence[Case]) -> None:
    """Note in each row how far its losses are off from those it is held against, relatively and at worst."""
    losses = {row["case"]: row["losses"] for row in rows if "failed" not in row}
    for row, case in zip(rows, measured, strict=True):
        if case.against in losses and case.name in losses:
            pairs = zip(losses[case.name], losses[case.against], strict=False)
            row["losses_off"] = max(abs(a - b) / abs(b) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Techniques for one device, on one CUDA GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/gpu-<device>.json")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a batch of the 1.5B model")
    parser.add_argument("--spill-batch-size", type=int, default=12, help="and of the 6B model")
    parser.add_argument("--only", default="", help="the cases whose names hold this, such as DeepSpeed")
    parser.add_argument("--minutes", type=float, default=10.0, help="what would take longer is left out")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16, where the GPU is not known")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible; --dry-run runs tiny models on the CPU")
    device_type = "cpu" if arguments.dry_run else "cuda"
    name = "cpu-dry-run" if arguments.dry_run else torch.cuda.get_device_name()
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    if arguments.peak_tflops:
        peak = arguments.peak_tflops * 1e12
    give_up_at = time.monotonic() + 60 * arguments.minutes - (0 if arguments.dry_run else 30)
    (rank,) = launching.launch_ranks(launching.pack("gpu_plain:ceilings"), 1, device_type=device_type)
    ceiling = rank["value"]
    print(json.dumps({"ceilings": ceiling}), flush=True)
    rows: list[dict[str, Any]] = []
    measured: list[Case] = []
    left_out: list[str] = []
    longest = 0.0
    chosen = cases(arguments.dry_run, arguments.batch_size, arguments.spill_batch_size)
    for case in (case for case in chosen if arguments.only in case.name):
        began = time.monotonic()
        if began + longest > give_up_at:
            left_out.append(case.name)
            continue
        rows.append(measure(case, device_type, peak))
        measured.append(case)
        longest = max(longest, time.monotonic() - began)
        print(json.dumps(rows[-1]), flush=True)
    compare_losses(rows, measured)
    small = Shape(layers=3, width=64, heads=2, vocabulary=128, tokens=32, batch_size=4)
    differences = deviations(small, device_type)
    print()
    print_table(rows)
    print("\ntimes as fast:", {name: round(ratio, 2) for name, ratio in ratios(rows).items()})
    if left_out:
        print(f"no time was left for: {', '.join(left_out)}")
    print("\nlosses against float64 on the CPU, ten steps, worst:")
    for row in differences:
        print(f"  {row['technique']:8} {row['precision']:8} {row['worst']:.1e}")
    output = arguments.output or Path(__file__).parent / f"gpu-{name.replace(' ', '-').lower()}.json"
    result = {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peak_flops": peak,
        "ceilings": ceiling,
        "cases": rows,
        "left_out": left_out,
        "times_as_fast": ratios(rows),
        "losses_against_float64": differences,
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
