"""How much memory this process has used at most, on the host and on its device."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

import torch

# Bytes that are pinned to see whether the resident memory shows them.
_PROBE = 2**24
# The share of a GPU's memory that a trial leaves free.
_HEADROOM = 0.05


def grow_segments() -> None:
    """Have torch take a GPU's memory in segments that grow; to be called before CUDA is used.

    Batches of many lengths break these into no pieces that nothing fits in (``expandable_segments`` in
    torch's notes on CUDA). What the environment says of torch's allocator stays as it is.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def reset_peaks(device: torch.device) -> None:
    """Start counting anew."""
    # proc(5): writing 5 resets VmHWM, the peak resident set. Some containers forbid it: then it counts from
    # the start of the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        _shows_pinned()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_host_memory_stats()
        torch.cuda.reset_peak_memory_stats(device)


def leave_headroom(device: torch.device) -> None:
    """Have this process take a little less of a GPU's memory than there is, for a trial: training meets
    longer batches than those of a trial."""
    if device.type == "cuda":
        allowed = min(1 - _HEADROOM, torch.cuda.get_per_process_memory_fraction(device))
        torch.cuda.set_per_process_memory_fraction(allowed, device)


def host_bytes() -> int:
    """The resident memory of this process and what it has pinned, in bytes."""
    return _of_status("VmRSS") + _pinned("current")


def peak_host_bytes() -> int:
    """The most resident memory since :func:`reset_peaks`, and the most that was pinned, in bytes."""
    return _of_status("VmHWM") + _pinned("peak")


def peak_device_bytes(device: torch.device) -> int:
    """The most memory torch took on ``device`` since :func:`reset_peaks`; on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return peak_host_bytes()


def _pinned(when: str) -> int:
    """Bytes that torch has pinned, as it rounds them, where the resident memory does not show them."""
    if not torch.cuda.is_initialized() or _shows_pinned():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{when}", 0))


@functools.cache
def _shows_pinned() -> bool:
    """Whether the resident memory shows what is pinned, which depends on the driver; to be asked before torch
    has pinned anything, since it pins nothing anew while it has some that is free."""
    before = _of_status("VmRSS")
    probe = torch.empty(_PROBE, dtype=torch.uint8, pin_memory=True)
    return _of_status("VmRSS") - before > len(probe) // 2


def _of_status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
