"""What machine a benchmark ran on."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, cores, memory (GiB), Python and the date; "shared" since others use the machine too."""
    cpu = "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = models[0] if models else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        "system": platform.system(),
        "date": date.today().isoformat(),
        "shared": True,
    }
