"""The node's devices, and how processes are kept from all but theirs."""

from __future__ import annotations

import importlib.util
import os
import sys

import fake_nvml
import pytest
import torch
from fake_nvml import GIB, Gpu

from saturn_airflow.launch import devices
from saturn_airflow.launch.devices import Device
from saturn_airflow.model.errors import DeviceError, InvalidSweepError

UUIDS = ["GPU-aa11", "GPU-bb22", "GPU-cc33", "GPU-dd44"]


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, UUIDS),
        ("", []),
        ("2,0", ["GPU-cc33", "GPU-aa11"]),
        ("GPU-bb22, 3", ["GPU-bb22", "GPU-dd44"]),
        ("GPU-b", ["GPU-bb22"]),
        ("MIG-1234", ["MIG-1234"]),
        ("0,7,1", ["GPU-aa11"]),
        ("-1", []),
    ],
)
def test_what_the_worker_may_see(variable: str | None, visible: list[str]) -> None:
    assert devices._visible(UUIDS, variable) == visible


def test_gpus_are_shown_by_uuid_in_the_plans_order() -> None:
    chosen = [Device(3, "GPU-dd44", "GPU-dd44"), Device(1, "GPU-bb22", "GPU-bb22")]
    assert devices.environment(chosen)["CUDA_VISIBLE_DEVICES"] == "GPU-dd44,GPU-bb22"


def test_cpu_slots_see_no_gpu() -> None:
    slots = devices.find("local", "cpu", 3)
    assert [slot.name for slot in slots] == ["local-cpu0", "local-cpu1", "local-cpu2"]
    assert devices.environment(slots)["CUDA_VISIBLE_DEVICES"] == ""


def test_cores_are_shared_among_the_slots() -> None:
    cores = len(os.sched_getaffinity(0))
    assert devices.threads_per_device(1) == cores
    assert devices.threads_per_device(2 * cores) == 1


def test_fewer_gpus_than_the_node_is_said_to_have() -> None:
    with pytest.raises(InvalidSweepError, match=r"node 'a' is said to have 99 h100 devices, but \d+ GPUs"):
        devices.find("a", "h100", 99)


def test_a_gpu_that_fell_off_the_bus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_nvml.install(monkeypatch, [Gpu("GPU-a"), Gpu("GPU-b", lost=True)])
    assert [device.uuid for device in devices.find("a", "h100", 1)] == ["GPU-a"]
    with pytest.raises(DeviceError, match=r"2 h100 devices, but 1 GPUs are visible here, and 1 more do not"):
        devices.find("a", "h100", 2)


def test_without_what_asks_the_driver_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pynvml" else find_spec(name)
    )
    with pytest.raises(InvalidSweepError, match=r"which GPUs node 'a' has: install nvidia-ml-py"):
        devices.find("a", "h100", 1)


def test_a_split_gpu_counts_as_its_parts_and_a_lost_one_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parts = [Gpu("MIG-1", total=10 * GIB), Gpu("MIG-2", total=20 * GIB)]
    fake_nvml.install(monkeypatch, [Gpu("GPU-a"), Gpu("GPU-b", lost=True), Gpu("GPU-c", parts=parts)])
    assert devices.gpu_uuids() == ["GPU-a", "MIG-1", "MIG-2"]
    assert devices.gpus() == dict.fromkeys(["GPU-a", "MIG-1", "MIG-2"], "Tested GPU")
    assert devices.smallest_gpu_bytes() == 10 * GIB


def test_cores_next_to_a_gpu_are_those_that_nvml_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    parts = [Gpu("MIG-3", cores=(2,))]
    fake_nvml.install(
        monkeypatch, [Gpu("GPU-1"), Gpu("GPU-2", cores=(0, 63, 64, 99)), Gpu("GPU-3", parts=parts)]
    )
    assert devices.cores_near("2") == {0, 63, 64, 99}
    assert devices.cores_near("MIG-3") == {2}
    assert devices.cores_near("GPU-1") == devices.cores_near("elsewhere") == set()


def test_ids_of_processes_are_the_hosts_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, [Gpu("GPU-a", pids=(7,))])
    here = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(devices, "_PIDS_OF_THE_HOST", here)
    assert devices.gpu_processes() == {"GPU-a": [7]}
    monkeypatch.setattr(devices, "_PIDS_OF_THE_HOST", here + 1)
    assert devices.gpu_processes() == {}


def test_memory_that_is_being_freed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Gpu("GPU-a", used=30 * GIB)
    fake_nvml.install(monkeypatch, [busy, Gpu("GPU-b", used=70 * GIB)])

    def poll() -> bool:
        busy.used = 0
        return False

    assert devices.wait_until_free(["GPU-a"], poll) == ""
    assert "70.0 GiB of GPU-b" in devices.wait_until_free(["GPU-a", "GPU-b"], poll, seconds=0)
    assert devices.wait_until_free([], poll, seconds=0) == ""


@pytest.mark.cuda
@pytest.mark.skipif(not devices.gpu_uuids(), reason="there is no GPU")
def test_gpus_as_nvml_and_cuda_see_them() -> None:
    uuids = devices.gpu_uuids()
    assert len(uuids) == torch.cuda.device_count()
    assert [device.uuid for device in devices.find("here", "gpu", len(uuids))] == uuids
    seen = devices.gpu_processes()  # of which a container tells nothing
    assert not seen or set(uuids) <= set(seen)
