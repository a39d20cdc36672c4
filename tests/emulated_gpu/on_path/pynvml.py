"""The emulated GPUs as NVML would tell of them."""

# ruff: noqa: N802 - the names are NVML's

from __future__ import annotations

import os
from types import SimpleNamespace

COUNT = int(os.environ.get("CUDA_EMULATED_GPUS") or 0)
BYTES = int(os.environ.get("CUDA_EMULATED_BYTES") or 8 * 2**30)
NVML_DEVICE_MIG_ENABLE = 1


class NVMLError(Exception):
    """What is not there."""


def nvmlInit() -> None:
    if not COUNT:
        raise NVMLError("there is no driver")


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return COUNT


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012}"


def nvmlDeviceGetName(index: int) -> str:
    return "Emulated"


def nvmlDeviceGetMigMode(index: int) -> list[int]:
    raise NVMLError("Not Supported")


def nvmlDeviceGetComputeRunningProcesses(index: int) -> list[object]:
    return []


def nvmlDeviceGetMemoryInfo(index: int) -> SimpleNamespace:
    return SimpleNamespace(total=BYTES, used=0, free=BYTES)


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 12080


def nvmlDeviceGetCpuAffinity(index: int, words: int) -> list[int]:
    return [2**64 - 1] * words
