"""A pynvml of GPUs that are split, lost or in use, for a machine that has none."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GIB = 2**30


class NVMLError(Exception):
    """What pynvml raises."""


@dataclass
class Gpu:
    """One GPU, or part of one."""

    uuid: str
    used: int = GIB // 2
    total: int = 80 * GIB
    pids: tuple[int, ...] = ()
    lost: bool = False
    cores: tuple[int, ...] = ()
    parts: list[Gpu] = field(default_factory=list)


def install(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu]) -> None:
    """Let ``import pynvml`` find these GPUs."""

    def by_index(i: int) -> Gpu:
        if gpus[i].lost:
            raise NVMLError("GPU is lost")
        return gpus[i]

    def part(whole: Gpu, i: int) -> Gpu:
        if i >= len(whole.parts):
            raise NVMLError("Not Found")
        return whole.parts[i]

    def processes(gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]

    def cores(gpu: Gpu, words: int) -> list[int]:
        if not gpu.cores:
            raise NVMLError("Not Supported")
        return [sum(1 << core % 64 for core in gpu.cores if core // 64 == word) for word in range(words)]

    module = ModuleType("pynvml")
    contents: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_DEVICE_MIG_ENABLE": 1,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
        "nvmlDeviceGetName": lambda gpu: b"Tested GPU",
        "nvmlDeviceGetMigMode": lambda gpu: [int(bool(gpu.parts)), int(bool(gpu.parts))],
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": part,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=gpu.used, total=gpu.total),
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetCpuAffinity": cores,
    }
    for name, value in contents.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
