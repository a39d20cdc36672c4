"""The rows of gpu.py's table: what is measured, of which shape, and what is held against what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_jobs import Shape

GIB = 2**30
#: What a plain loop does in the place of a technique.
PLAIN = ("plain", "plain, recomputed", "plain FSDP2, offloaded")
DEEPSPEED = "DeepSpeed, offloaded"
#: Who keeps weights and the optimizer in the host's memory.
OFFLOADED = ("spill", "plain FSDP2, offloaded", DEEPSPEED)
# The part of a GPU's memory that predictions may fill, and what libraries need besides tensors.
_FILLED, _LIBRARIES = 0.92, 1.5 * GIB
# Of the host's memory: for Python and CUDA.
_OF_THE_PROCESS = 4 * GIB


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
    faster_than: Sequence[str] = ()  # the cases whose speed this is a multiple of

    def why_not(self, device_bytes: float, host_bytes: float) -> str | None:
        """Why it can't be measured with so much memory; None where it seems to fit.

        :param device_bytes: of the GPU.
        :param host_bytes: what is available of the host's.
        """
        spilled = self.technique in OFFLOADED
        needs = self.shape.host_bytes(spilled=spilled) + _OF_THE_PROCESS
        if needs > host_bytes:
            return (
                f"it takes about {needs / GIB:.0f} GiB of host memory, {host_bytes / GIB:.0f} are available"
            )
        recompute = self.technique != "plain" and (self.technique != "single" or bool(self.parameters))
        if not spilled and not fits(self.shape, device_bytes, recompute=recompute):
            takes = (self.shape.device_bytes(recompute=recompute) + _LIBRARIES) / GIB
            return f"it takes about {takes:.0f} GiB of the GPU's {device_bytes / GIB:.0f}"
        return None


def fits(shape: Shape, device_bytes: float, *, recompute: bool) -> bool:
    """Whether a model seems to train in a GPU's memory."""
    return shape.device_bytes(recompute=recompute) + _LIBRARIES <= _FILLED * device_bytes


def largest(shapes: Sequence[Shape], device_bytes: float, *, recompute: bool) -> Shape:
    """The first of ``shapes`` that seems to fit, the last where none does."""
    return next((s for s in shapes if fits(s, device_bytes, recompute=recompute)), shapes[-1])


def in_memory(whole: Shape, device_bytes: float) -> Shape:
    """As many layers of a model as a GPU holds with re-computation, to be held against in memory."""
    fewer = [dataclasses.replace(whole, layers=n) for n in range(whole.layers, 1, -1)]
    return largest(fewer, device_bytes, recompute=True)


def label(name: str, shape: Shape, whole: Shape) -> str:
    """What rows of ``shape``, some layers of ``whole``, are called."""
    return name if shape.layers == whole.layers else f"{name} ({shape.layers} of {whole.layers} layers)"


def sizes(device_bytes: float, batch_size: int, spill_batch_size: int) -> dict[str, Shape]:
    """The shapes that are measured, by name: ``small``, ``large`` and so on."""
    small = Shape(layers=48, width=1600, heads=25, vocabulary=50304, tokens=1024, batch_size=batch_size)
    smaller = [dataclasses.replace(small, batch_size=n) for n in (batch_size, 12, 8, 4, 2) if n <= batch_size]
    wide = {"width": 4096, "heads": 32, "vocabulary": 16384, "tokens": 1024, "batch_size": spill_batch_size}
    return {
        "small": largest(smaller, device_bytes, recompute=False),
        "large": Shape(layers=30, **wide),
        "llama": Shape(layers=24, inner=11008, **wide),
        "adapters": Shape(
            layers=60,
            width=6656,
            heads=52,
            vocabulary=32000,
            tokens=1024,
            batch_size=6,
            inner=17920,
            adapters=16,
        ),
    }


def tiny_sizes() -> dict[str, Shape]:
    """The same names for a dry run."""
    tiny = {"width": 32, "heads": 2, "vocabulary": 64, "tokens": 16, "batch_size": 4}
    return {
        "small": Shape(layers=3, **tiny),
        "large": Shape(layers=6, **tiny),
        "llama": Shape(layers=3, inner=88, **tiny),
        "adapters": Shape(layers=3, inner=88, adapters=2, **tiny),
    }


def cases(
    shapes: dict[str, Shape], batch_sizes: Sequence[int], holds: Callable[[Shape], Shape]
) -> list[Case]:
    """What is measured, what matters most first.

    A model that a GPU does not hold is spilled whole, and held against in memory with as many of its layers
    as fit: both then have those.

    :param batch_sizes: of further rows of the large model.
    :param holds: as many layers of a model as the GPU holds.
    """
    small, large, llama, adapters = (shapes[name] for name in ("small", "large", "llama", "adapters"))
    longer = dataclasses.replace(large, batch_size=large.batch_size * 4 // 3)
    held = dataclasses.replace(large, layers=holds(longer).layers)
    held_longer = dataclasses.replace(longer, layers=held.layers)
    held_llama = holds(llama)
    name, llama_name = label("6B", held, large), label("Llama", held_llama, llama)
    cap, memory, llama_memory = 16 * GIB, f"{name}, plain, recomputed", f"{llama_name}, plain, recomputed"
    fsdp, deepspeed = "6B, plain FSDP2, offloaded", "6B, DeepSpeed, offloaded"
    longest = f"{name}, plain, recomputed, clipped, longer batch"
    clips, whole = {"clip_grad_norm": 1.0}, held.layers == large.layers
    against = memory if whole else "6B, spill"
    beaten = (memory, fsdp, deepspeed) if whole else (memory,)
    spilled = Case(f"{name}, spill", held, "spill", cap=cap, against=memory, faster_than=beaten)
    deep = Case("6B, spill", large, "spill", cap=cap, faster_than=(fsdp, deepspeed))
    faster = (llama_memory,)
    spilled_llama = Case(
        f"{llama_name}, spill", held_llama, "spill", cap=cap, against=llama_memory, faster_than=faster
    )
    return [
        Case("1.5B, plain", small, "plain"),
        Case("1.5B, single", small, "single", against="1.5B, plain", faster_than=("1.5B, plain",)),
        Case(memory, held, "plain, recomputed"),
        spilled,
        *([] if whole else [deep]),
        Case(fsdp, large, "plain FSDP2, offloaded", cap=cap, against=against),
        Case(
            f"{name}, spill, clipped, longer batch",
            held_longer,
            "spill",
            cap=cap,
            hparams=clips,
            against=longest,
            faster_than=(longest,),
        ),
        Case(longest, held_longer, "plain, recomputed", hparams=clips),
        Case("30B, adapters, spill", adapters, "spill", cap=24 * GIB),
        Case("1.5B, single, compiled", small, "single", compile=True, against="1.5B, plain"),
        Case(llama_memory, held_llama, "plain, recomputed"),
        spilled_llama,
        *(
            Case(f"6B, spill, batches of {n}", dataclasses.replace(large, batch_size=n), "spill", cap=cap)
            for n in batch_sizes
        ),
        Case(deepspeed, large, DEEPSPEED, cap=cap, against=against),
        Case("6B, spill, accumulated", large, "spill", cap=cap, hparams={"accumulate": 2}),
        Case(f"{name}, single, recomputed", held, "single", {"recompute": True}, against=memory),
    ]


def ratios(rows: Sequence[dict[str, Any]], measured: Sequence[Case]) -> dict[str, float]:
    """How many times as fast Saturn is as plain loops."""
    speed = {row["case"]: row["tokens_per_second"] for row in rows if "failed" not in row}
    pairs = [(case.name, other) for case in measured for other in case.faster_than]
    return {f"{a} / {b}": speed[a] / speed[b] for a, b in pairs if a in speed and b in speed}


def compare_losses(rows: Sequence[dict[str, Any]], measured: Sequence[Case]) -> None:
    """Note in each row how far its losses are off from those it is held against, relatively and at worst."""
    losses = {row["case"]: row["losses"] for row in rows if "failed" not in row}
    for row, case in zip(rows, measured, strict=True):
        if case.against in losses and case.name in losses:
            pairs = zip(losses[case.name], losses[case.against], strict=False)
            row["losses_off"] = max(abs(a - b) / abs(b) for a, b in pairs)
