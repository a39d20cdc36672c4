"""What one CUDA GPU makes of the techniques for one device; needs torch and transformers.

    python benchmarks/gpu.py                     # on a GPU: minutes, and about 110 GiB of host memory
    python benchmarks/gpu.py --dry-run           # anywhere: tiny models, to see that it runs

It measures

* ``single`` on a GPT-2-like model of 1.5B parameters: tokens per second and model FLOPs utilisation (MFU),
  counted as in PaLM (Chowdhery et al., 2022, appendix B): recomputed activations count for nothing;
* a model of 6B parameters under ``spill``, with the GPU's memory capped to 16 GiB, against FSDP2 with
  offloading to the host under the same cap, and against the same model in the GPU's memory where it fits;
* how far losses are from those of float64 on a small model.

It prints a table and writes JSON. The aims, on a GPU such as an H100: 50% MFU for ``single``; ``spill`` at
60% of the speed in memory and at 1.5 times that of FSDP2 with offloading.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from saturn_airflow.launch import launching
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training.loop import train
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
class Shape:
    """A GPT-2-like model and its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int  # in a sequence
    batch_size: int

    @property
    def parameters(self) -> int:
        """Parameters, the output tied to the embedding."""
        return self.layers * 12 * self.width**2 + (self.vocabulary + self.tokens) * self.width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 for each parameter, and attention."""
        return 6 * self.parameters + 12 * self.layers * self.width * self.tokens


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    shape: Shape
    technique: str
    parameters: dict[str, Any] = field(default_factory=dict)
    compile: bool = False
    cap: int | None = None  # bytes of the GPU's memory


def model(layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> nn.Module:
    """GPT-2 of this shape, its weights filled quickly: what they are does not change the speed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=tokens,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with torch.device("meta"):
        built = GPT2LMHeadModel(config)
    built.to_empty(device="cpu")
    built.tie_weights()
    pattern = torch.randn(2**20) * 0.02
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float("ln" in name and name.endswith("weight")))
            else:
                for part in parameter.flatten().split(len(pattern)):  # type: ignore[no-untyped-call]
                    part.copy_(pattern[: len(part)])
        for buffer in built.buffers():
            buffer.zero_()
    return built


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __init__(self, vocabulary: int, tokens: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, vocabulary, (samples, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def data(vocabulary: int, tokens: int, batch_size: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Four batches of random tokens."""
    return DataLoader(
        RandomTokens(vocabulary, tokens, 4 * batch_size),
        batch_size=batch_size,
        pin_memory=torch.cuda.is_available(),
    )


def loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def job(shape: Shape, **hparams: Any) -> Job:
    """The job of this shape."""
    sizes = {"vocabulary": shape.vocabulary, "tokens": shape.tokens}
    return Job(
        "benchmark",
        load_model="gpu:model",
        load_dataloader="gpu:data",
        loss_function="gpu:loss",
        model_args={"layers": shape.layers, "width": shape.width, "heads": shape.heads, **sizes},
        data_args=sizes,
        hparams=HParams(**{"lr": 1e-4, "batch_size": shape.batch_size, **hparams}),
    )


def train_capped(request: TrainRequest, cap: int | None, ranks: Ranks) -> dict[str, Any]:
    """Train on a GPU of which no more than ``cap`` bytes may be used."""
    if cap is not None and ranks.device.type == "cuda":
        whole = torch.cuda.get_device_properties(ranks.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / whole))
    torch.backends.cuda.matmul.allow_tf32 = True
    return train(request, ranks)


def losses_of(requests: Sequence[TrainRequest], ranks: Ranks) -> list[list[float]]:
    """The losses of short trainings, one after the other."""
    import dataclasses

    found = []
    for request in requests:
        losses: list[float] = []

        def note(event: dict[str, Any], losses: list[float] = losses) -> None:
            if event["event"] == "step":
                losses.append(event["loss"])

        train(request, dataclasses.replace(ranks, _emit=note))
        found.append(losses)
    return found


def measure(case: Case, device_type: str, peak_flops: float | None) -> dict[str, Any]:
    """Run one case in a process of its own."""
    precise = job(case.shape, precision="bf16", compile=case.compile)
    request = TrainRequest(
        job=precise.to_dict(),
        technique=case.technique,
        parameters=case.parameters,
        measure=Measure(warmups=3, batches=10, seconds=120.0) if device_type == "cuda" else Measure(1, 2),
    )
    row: dict[str, Any] = {
        "case": case.name,
        "technique": case.technique,
        "parameters": case.parameters,
        "compile": case.compile,
        "model_parameters": case.shape.parameters,
        "batch": [case.shape.batch_size, case.shape.tokens],
        "cap_gib": case.cap / GIB if case.cap else None,
    }
    call = launching.pack("gpu:train_capped", request, case.cap)
    threads = len(os.sched_getaffinity(0)) if device_type == "cuda" else 1
    try:
        (rank,) = launching.launch_ranks(call, 1, device_type=device_type, threads=threads)
    except RanksFailedError as error:
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
    """What is measured."""
    if dry_run:
        small = Shape(layers=3, width=32, heads=2, vocabulary=64, tokens=16, batch_size=4)
        large = Shape(layers=6, width=32, heads=2, vocabulary=64, tokens=16, batch_size=4)
    else:
        small = Shape(layers=48, width=1600, heads=25, vocabulary=50304, tokens=1024, batch_size=batch_size)
        large = Shape(
            layers=30, width=4096, heads=32, vocabulary=16384, tokens=1024, batch_size=spill_batch_size
        )
    cap = 16 * GIB
    return [
        Case("single, 1.5B", small, "single"),
        Case("single, 1.5B, compiled", small, "single", compile=True),
        Case("single, 1.5B, recomputed", small, "single", {"recompute": True}),
        Case("6B spilled", large, "spill", {"resident": 2}, cap=cap),
        Case("6B spilled, 3 resident", large, "spill", {"resident": 3}, cap=cap),
        Case("6B, FSDP2 offloaded", large, "fsdp", {"recompute": True, "offload": True}, cap=cap),
        Case("6B in memory", large, "single", {"recompute": True}),
    ]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The cases, one line each."""
    print(f"{'case':28} {'s/batch':>9} {'tokens/s':>10} {'MFU':>6} {'GPU GiB':>8} {'host GiB':>9}")
    for row in rows:
        if "failed" in row:
            print(f"{row['case']:28} {row['failed']}: {row['why'][:70]}")
            continue
        mfu = f"{row['mfu']:6.1%}" if row["mfu"] else "     -"
        print(
            f"{row['case']:28} {row['seconds_per_batch']:9.4f} {row['tokens_per_second']:10,.0f} {mfu} "
            f"{row['peak_device_gib']:8.2f} {row['peak_host_gib']:9.2f}"
        )


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Spilling against its rivals: the best of its cases, times as fast."""
    speed = {row["case"]: row["tokens_per_second"] for row in rows if "failed" not in row}
    spilled = max((s for case, s in speed.items() if case.startswith("6B spilled")), default=None)
    rivals = {"in memory": "6B in memory", "FSDP2 offloaded": "6B, FSDP2 offloaded"}
    if spilled is None:
        return {}
    return {name: spilled / speed[case] for name, case in rivals.items() if case in speed}


def main() -> None:
    parser = argparse.ArgumentParser(description="Techniques for one device, on one CUDA GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/gpu-<device>.json")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a batch of the 1.5B model")
    parser.add_argument("--spill-batch-size", type=int, default=12, help="and of the 6B model")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16, where the GPU is not known")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible; --dry-run runs tiny models on the CPU")
    device_type = "cpu" if arguments.dry_run else "cuda"
    name = "cpu-dry-run" if arguments.dry_run else torch.cuda.get_device_name()
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    if arguments.peak_tflops:
        peak = arguments.peak_tflops * 1e12
    rows = []
    for case in cases(arguments.dry_run, arguments.batch_size, arguments.spill_batch_size):
        rows.append(measure(case, device_type, peak))
        print(json.dumps(rows[-1]), flush=True)
    small = Shape(layers=3, width=64, heads=2, vocabulary=128, tokens=32, batch_size=4)
    differences = deviations(small, device_type)
    print()
    print_table(rows)
    print("\nspilled, times as fast as:", {name: round(ratio, 2) for name, ratio in ratios(rows).items()})
    print("\nlosses against float64 on the CPU, ten steps, worst:")
    for row in differences:
        print(f"  {row['technique']:8} {row['precision']:8} {row['worst']:.1e}")
    output = arguments.output or Path(__file__).parent / f"gpu-{name.replace(' ', '-').lower()}.json"
    result = {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peak_flops": peak,
        "cases": rows,
        "spilled_times_as_fast_as": ratios(rows),
        "losses_against_float64": differences,
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    main()
