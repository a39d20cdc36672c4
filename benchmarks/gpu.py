"""What one CUDA GPU makes of the techniques for one device; needs torch and transformers.

    python benchmarks/gpu.py                     # on a GPU: ten minutes at most, about 115 GiB of host memory
    python benchmarks/gpu.py --dry-run           # anywhere: tiny models, to see that it runs

It measures, in bf16,

* what the machine can do at all: products of matrices, copies to and from the GPU, copies in host memory;
* ``single`` on a GPT-2-like model of 1.5B parameters: tokens per second and model FLOPs utilisation (MFU),
  counted as in PaLM (Chowdhery et al., 2022, appendix B): recomputed activations count for nothing;
* a model of 6B parameters and one of Llama's shape under ``spill``, with the GPU's memory capped to 16 GiB,
  at several batch sizes, with and without clipping and accumulation; and adapters beside 30B frozen
  parameters, with 24 GiB;
* each phase of a step, as the device gets to it: forward, backward, optimizer, and the rest;
* each against a plain loop of torch, without Saturn, on the same weights and batches: in memory, in memory
  with re-computation, and FSDP2 with offloading at its best (fused Adam, bf16 gathers, re-computation); and,
  where it is installed, against DeepSpeed's ZeRO stage 3 with weights and optimizer on the host;
* how far losses are from the plain loop's at that size, and from those of float64 on a small model.

In memory 6B parameters take about 110 GiB. A GPU that has less is given the largest batch of the 1.5B model
that fits, and in memory and under ``spill`` as many of the 6B model's layers as fit; the whole is spilled
besides. The rows say which shape they are of. What does not fit, on the device or the host, is left out with
the reason; a row that runs out of capped memory is measured with half as much again, and says so; one that
takes too long is ended.

It prints a table and writes JSON, after each row what there is, which names what there was no time for. The
aims, on a GPU such as an H100: 50% MFU for ``single`` and 98% of the plain loop's speed; ``spill`` at 60% of
the speed in memory and at 1.5 times that of FSDP2 with offloading.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import torch
from gpu_cases import DEEPSPEED, GIB, PLAIN, Case, cases, compare_losses, in_memory, ratios, sizes, tiny_sizes
from gpu_deepspeed import why_not
from gpu_jobs import Shape, job
from gpu_plain import Phases, cap_memory

from saturn_airflow.launch import host_memory, launching
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.training.loop import train
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.ranks import Ranks

# Dense bf16 FLOP/s from the vendors' data sheets, by a part of the device's name; the first that matches.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True)
class Machine:
    """What is measured on.

    :param peak_flops: dense bf16, where the GPU is known.
    :param ceilings: see :func:`gpu_plain.ceilings`.
    """

    device: str
    device_type: str
    device_bytes: float
    peak_flops: float | None
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """For a rank."""
        return len(os.sched_getaffinity(0)) if self.device_type == "cuda" else 1


# A row that takes longer is ended: something hangs, or waits for memory.
_ROW_SECONDS = 240.0
# What is left at the end for the losses of a small model.
_SECONDS_OF_DEVIATIONS = 60.0


class TooLongError(Exception):
    """A row has taken longer than it may."""


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


def measure(case: Case, machine: Machine, seconds: float) -> dict[str, Any]:
    """Run one case in a process of its own, for at most so many seconds."""
    on_gpu = machine.device_type == "cuda"
    precise = job(case.shape, precision="bf16", compile=case.compile, **case.hparams)
    request = TrainRequest(
        job=precise,
        technique=case.technique,
        parameters=case.parameters,
        measure=Measure(warmups=2, batches=5, seconds=60.0) if on_gpu else Measure(1, 2),
    )
    row: dict[str, Any] = {
        "case": case.name,
        "technique": case.technique,
        "parameters": case.parameters,
        "compile": case.compile,
        "model_parameters": case.shape.parameters,
        "layers": case.shape.layers,
        "batch": [case.shape.batch_size, case.shape.tokens],
        **case.hparams,
        "cap_gib": case.cap / GIB if case.cap else None,
    }
    why = case.why_not(machine.device_bytes, host_memory.available())
    if case.technique == DEEPSPEED:
        why = why_not(machine.device_type) or why
    if why:
        return {**row, "failed": "left out", "why": why}
    functions = {DEEPSPEED: "gpu_deepspeed:train_with_deepspeed"} | dict.fromkeys(
        PLAIN, "gpu_plain:train_plainly"
    )
    call = launching.pack(functions.get(case.technique, "gpu:train_capped"), request, case.cap)
    try:
        (rank,) = launching.launch_ranks(
            call, 1, device_type=machine.device_type, threads=machine.threads, poll=ending_after(seconds)
        )
    except RanksFailedError as error:  # the others are measured all the same
        return {**row, "failed": error.failure.status, "why": error.failure.reason[:300]}
    except TooLongError:
        return {**row, "failed": "hung", "why": f"it took longer than {seconds:.0f} s"}
    seconds_per_batch = rank["value"]["seconds_per_batch"]
    tokens_per_second = case.shape.batch_size * case.shape.tokens / seconds_per_batch
    flops = tokens_per_second * case.shape.flops_per_token
    return {
        **row,
        "seconds_per_batch": seconds_per_batch,
        "spread": rank["value"]["spread"],
        "tokens_per_second": tokens_per_second,
        "mfu": flops / machine.peak_flops if machine.peak_flops else None,
        "peak_device_gib": rank["peak_device_bytes"] / GIB,
        "peak_host_gib": rank["peak_host_bytes"] / GIB,
        "losses": rank["value"]["losses"],
        "phases": rank["value"]["phases"],
    }


def ending_after(seconds: float) -> Callable[[], bool]:
    """What ends the processes that it is asked about when so many seconds are over."""
    give_up_at = time.monotonic() + seconds

    def late() -> bool:
        if time.monotonic() > give_up_at:
            raise TooLongError
        return False

    return late


def deviations(shape: Shape, device_type: str, end_at: float) -> list[dict[str, Any]]:
    """How far the losses of ten steps are from those that float64 gives on the CPU.

    :param end_at: when it is to end at the latest (``time.monotonic``).
    :raises TooLongError: when it would take longer.
    """
    variants = [(t, p) for p in ("float64", "float32", "bf16") for t in ("single", "spill", "fsdp")]
    with tempfile.TemporaryDirectory() as folder:
        requests = [
            TrainRequest(
                job=job(shape, precision=precision, batches=10),
                technique=technique,
                folder=f"{folder}/{technique}-{precision}",
                checkpoint_seconds=None,
            )
            for technique, precision in variants
        ]
        reference = TrainRequest(job=requests[0].job, technique="single", folder=f"{folder}/cpu")
        (exact,) = launch_losses([reference], "cpu", end_at)
        found = launch_losses(requests, device_type, end_at)
    return [
        {
            "technique": technique,
            "precision": precision,
            "worst": max(abs(a - b) for a, b in zip(losses, exact, strict=True)),
        }
        for (technique, precision), losses in zip(variants, found, strict=True)
    ]


def launch_losses(requests: Sequence[TrainRequest], device_type: str, end_at: float) -> list[list[float]]:
    """:func:`losses_of`, in a process of its own."""
    call, poll = launching.pack("gpu:losses_of", list(requests)), ending_after(end_at - time.monotonic())
    (rank,) = launching.launch_ranks(call, 1, device_type=device_type, poll=poll)
    value: list[list[float]] = rank["value"]
    return value


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


def look_at(dry_run: bool, peak_tflops: float | None) -> Machine:
    """The machine, as a rank sees it: nobody else is to have a context on the GPU."""
    device_type = "cpu" if dry_run else "cuda"
    (rank,) = launching.launch_ranks(launching.pack("gpu_plain:machine"), 1, device_type=device_type)
    found = rank["value"]
    peak = next((flops for part, flops in PEAKS.items() if part in found["device"]), None)
    return Machine(device_type=device_type, peak_flops=peak_tflops * 1e12 if peak_tflops else peak, **found)


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
    end_at = time.monotonic() + 60 * arguments.minutes
    end_at += _SECONDS_OF_DEVIATIONS if arguments.dry_run else 0.0  # nobody is kept from a GPU
    machine = look_at(arguments.dry_run, arguments.peak_tflops)
    output = (
        arguments.output or Path(__file__).parent / f"gpu-{machine.device.replace(' ', '-').lower()}.json"
    )
    shapes, batch_sizes = tiny_sizes(), [2]
    if not arguments.dry_run:
        shapes = sizes(machine.device_bytes, arguments.batch_size, arguments.spill_batch_size)
        batch_sizes = [4, 8, 24]
    chosen = cases(shapes, batch_sizes, lambda whole: in_memory(whole, machine.device_bytes))
    result: dict[str, Any] = {
        **asdict(machine),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cases": [],
        "left_out": [],
        "times_as_fast": {},
        "losses_against_float64": [],
    }
    print(json.dumps({"device": machine.device, "ceilings": machine.ceilings}), flush=True)
    run_all([c for c in chosen if arguments.only in c.name], machine, end_at, result, output)
    tell(result)
    print(f"\nwritten to {output}")


def run_all(
    chosen: Sequence[Case], machine: Machine, end_at: float, result: dict[str, Any], output: Path
) -> None:
    """Measure what there is time for; ``result`` is written to ``output`` whenever there is more of it."""
    measured: list[Case] = []
    longest = 0.0
    give_up_at = end_at - _SECONDS_OF_DEVIATIONS
    for case in chosen:
        began = time.monotonic()
        if began + longest > give_up_at:
            result["left_out"].append(case.name)
            continue
        row = measure(case, machine, max(10.0, min(_ROW_SECONDS, give_up_at - began)))
        if row.get("failed") == "out_of_memory" and case.cap:
            more = dataclasses.replace(case, cap=case.cap * 3 // 2)
            left = max(10.0, min(_ROW_SECONDS, give_up_at - time.monotonic()))
            row = {**measure(more, machine, left), "out_of_memory_within_gib": case.cap / GIB}
        result["cases"].append(row)
        measured.append(case)
        if row.get("failed") != "hung":
            longest = max(longest, time.monotonic() - began)
        print(json.dumps(row), flush=True)
        compare_losses(result["cases"], measured)
        result["times_as_fast"] = ratios(result["cases"], measured)
        output.write_text(json.dumps(result, indent=1) + "\n")
    small = Shape(layers=3, width=64, heads=2, vocabulary=128, tokens=32, batch_size=4)
    try:
        result["losses_against_float64"] = deviations(small, machine.device_type, end_at)
    except (RanksFailedError, TooLongError) as error:
        result["left_out"].append(f"losses against float64: {type(error).__name__} {error}")
    output.write_text(json.dumps(result, indent=1) + "\n")


def tell(result: dict[str, Any]) -> None:
    """Print what was found."""
    print()
    print_table(result["cases"])
    print("\ntimes as fast:", {name: round(ratio, 2) for name, ratio in result["times_as_fast"].items()})
    if result["left_out"]:
        print(f"no time was left for: {', '.join(result['left_out'])}")
    print("\nlosses against float64 on the CPU, ten steps, worst:")
    for row in result["losses_against_float64"]:
        print(f"  {row['technique']:8} {row['precision']:8} {row['worst']:.1e}")


if __name__ == "__main__":
    main()
