"""How much memory this process has used at most, on the host and on its device."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch


def reset_peaks(device: torch.device) -> None:
    """Start counting anew."""
    # proc(5): writing 5 resets VmHWM, the peak resident set. Some containers forbid it: then it counts from
    # the start of the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_host_bytes() -> int:
    """The largest resident memory of this process since :func:`reset_peaks`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_device_bytes(device: torch.device) -> int:
    """The most memory torch took on ``device`` since :func:`reset_peaks`; on a CPU the resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return peak_host_bytes()
