"""The devices of this node: their names in leases, and how the CUDA runtime is told to see no others."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from saturn_airflow.model.errors import DeviceError, InvalidSweepError

# The number of the kernel's first namespace of process ids (PROC_PID_INIT_INO in linux/proc_ns.h).
_PIDS_OF_THE_HOST = 0xEFFFFFFC
# The driver's own memory, and what a desktop holds, are no reason to wait.
_FREE_BYTES, _FREE_SHARE = 2**30, 0.05
# The memory of a process that was killed is freed within seconds.
_FREED_SECONDS = 10.0


@dataclass(frozen=True)
class Device:
    """One device of this node.

    :param id: its number on the node, from 0, as plans have it.
    :param name: its name in the leases: a GPU's UUID, which is the same for all who see the GPU, or the
        node's name and the slot for a CPU slot.
    :param uuid: the GPU's UUID; empty for a CPU slot.
    """

    id: int
    name: str
    uuid: str = ""


def find(node: str, kind: str, count: int) -> list[Device]:
    """The ``count`` devices of this node.

    Where ``CUDA_VISIBLE_DEVICES`` is set for the worker, the GPUs are those it names, in its order.

    :raises InvalidSweepError: when this machine has fewer GPUs, or can't be asked for them.
    :raises DeviceError: when it has fewer since one of them does not answer any more.
    """
    if kind == "cpu":
        return [Device(i, f"{node}-cpu{i}") for i in range(count)]
    uuids = gpu_uuids()
    if not uuids and importlib.util.find_spec("pynvml") is None:
        raise InvalidSweepError(
            f"nobody can say which GPUs node {node!r} has: install nvidia-ml-py there, which asks the driver"
        )
    if len(uuids) < count:
        has = f"node {node!r} is said to have {count} {kind} devices, but {len(uuids)} GPUs are visible here"
        if lost := _not_answering():
            raise DeviceError(f"{has}, and {lost} more do not answer: see nvidia-smi and dmesg (Xid) there")
        raise InvalidSweepError(
            f"{has}; correct the Node, or what the worker may see (CUDA_VISIBLE_DEVICES, its container)"
        )
    return [Device(i, uuids[i], uuids[i]) for i in range(count)]


def gpu_uuids() -> list[str]:
    """UUIDs of the GPUs this process may use; none where there is no NVIDIA driver. Never touches CUDA.

    A GPU that is split (MIG) counts as its parts; one that does not answer any more is left out.
    """
    return _visible(list(gpus()), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _not_answering() -> int:
    """How many GPUs of this machine do not answer, as one that fell off the bus."""
    lost = 0
    with _nvml() as nvml:
        for i in range(0 if nvml is None else nvml.nvmlDeviceGetCount()):
            try:
                nvml.nvmlDeviceGetHandleByIndex(i)
            except nvml.NVMLError:
                lost += 1
    return lost


def gpus() -> dict[str, str]:
    """The product name of every GPU of this machine, or part of one, by UUID, in their order."""
    with _nvml() as nvml:
        return {} if nvml is None else {uuid: name for uuid, name, _ in _parts(nvml)}


def gpu_processes() -> dict[str, list[int]]:
    """Ids of the processes that NVML sees on each GPU, by UUID; none in a container.

    NVML gives the ids that processes have on the host, which are other processes' in a container.
    """
    with _nvml() as nvml:
        if nvml is None or os.stat("/proc/self/ns/pid").st_ino != _PIDS_OF_THE_HOST:
            return {}
        found = {}
        for uuid, _, part in _parts(nvml):
            with contextlib.suppress(nvml.NVMLError):
                found[uuid] = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(part)]
        return found


def used_bytes(uuids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The memory that is in use on each of these GPUs, by whomever, and all that it has."""
    with _nvml() as nvml:
        if nvml is None:
            return {}
        found = {}
        for uuid, _, part in _parts(nvml):
            if uuid in uuids:
                with contextlib.suppress(nvml.NVMLError):
                    memory = nvml.nvmlDeviceGetMemoryInfo(part)
                    found[uuid] = int(memory.used), int(memory.total)
        return found


def wait_until_free(uuids: Sequence[str], poll: Callable[[], bool], seconds: float = _FREED_SECONDS) -> str:
    """Wait for the memory of these GPUs to be freed by whoever had them: leases bind nobody but Saturn.

    :param poll: called five times a second; True ends the waiting.
    :param seconds: how long to wait at most.
    :returns: who is still in the way, as a sentence; empty where nobody is.
    """
    give_up_at = time.monotonic() + seconds
    while True:
        in_use = {
            uuid: used
            for uuid, (used, total) in used_bytes(uuids).items()
            if used > max(_FREE_BYTES, _FREE_SHARE * total)
        }
        if not in_use:
            return ""
        if time.monotonic() > give_up_at:
            told = ", ".join(f"{used / 2**30:.1f} GiB of {uuid}" for uuid, used in in_use.items())
            return f"{told} are in use by processes that are not Saturn's; what fits and how fast will be off"
        if poll():
            return ""
        time.sleep(0.2)


def smallest_gpu_bytes() -> int | None:
    """The memory of the smallest GPU that this process may use; None where there is none."""
    return min((total for _, total in used_bytes(gpu_uuids()).values()), default=None)


def driver_cuda() -> tuple[int, int] | None:
    """The newest version of CUDA that the driver can run; None where there is no driver."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return number // 1000, number % 1000 // 10


def environment(devices: Sequence[Device]) -> dict[str, str]:
    """Environment variables under which a process sees these devices and no others."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices if device.uuid),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # torch.cuda.is_available() then asks NVML; asking CUDA would break it in processes forked later.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def threads_per_device(devices: int) -> int:
    """CPU threads for each of a node's devices, so that all of them busy do not share a core."""
    return max(1, len(os.sched_getaffinity(0)) // devices)


def _visible(uuids: list[str], variable: str | None) -> list[str]:
    """Apply ``CUDA_VISIBLE_DEVICES``: numbers or (beginnings of) UUIDs, up to the first unknown one."""
    if variable is None:
        return uuids
    chosen: list[str] = []
    for part in (part.strip() for part in variable.split(",")):
        if part.isdigit() and int(part) < len(uuids):
            chosen.append(uuids[int(part)])
        elif part.startswith("MIG-"):
            chosen.append(part)
        elif part.startswith("GPU-") and (match := [uuid for uuid in uuids if uuid.startswith(part)]):
            chosen.append(match[0])
        else:
            break
    return chosen


def cores_near(uuid: str) -> set[int]:
    """The machine's cores that are next to a GPU, as NVML tells; none where it does not.

    :param uuid: the GPU's, with or without what it begins with, ``GPU-`` or ``MIG-``.
    """
    with _nvml() as nvml:
        if nvml is None:
            return set()
        words = -(-os.sysconf("SC_NPROCESSORS_CONF") // 64)
        with contextlib.suppress(nvml.NVMLError):
            for found, _, handle in _parts(nvml):
                if found.endswith(uuid):
                    mask = nvml.nvmlDeviceGetCpuAffinity(handle, words)
                    return {
                        64 * i + bit for i, word in enumerate(mask) for bit in range(64) if word >> bit & 1
                    }
    return set()


def _parts(nvml: Any) -> Iterator[tuple[str, str, Any]]:
    """UUID, name and handle of every GPU that answers, or of its parts where it is split."""
    for i in range(nvml.nvmlDeviceGetCount()):
        # A GPU that fell off the bus raises here, and the others are as good as before.
        with contextlib.suppress(nvml.NVMLError):
            whole = nvml.nvmlDeviceGetHandleByIndex(i)
            for part in _split(nvml, whole) or [whole]:
                yield as_text(nvml.nvmlDeviceGetUUID(part)), as_text(nvml.nvmlDeviceGetName(part)), part


def _split(nvml: Any, whole: Any) -> list[Any]:
    """The parts that a GPU is split into (MIG); none where it is whole."""
    parts = []
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(whole)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
                with contextlib.suppress(nvml.NVMLError):
                    parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, i))
    return parts


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ModuleNotFoundError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def as_text(value: str | bytes) -> str:
    """What NVML says: older versions of its Python package say it in bytes."""
    return value.decode() if isinstance(value, bytes) else value
