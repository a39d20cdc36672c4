"""What errors of a GPU mean for the job that meets them, by the texts that CUDA and torch give them."""

from __future__ import annotations

import gc
import json
import signal
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import small_job, spec_for

from saturn_airflow.launch import descendants, devices, failures, past_runs
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.supervisor import Supervisor
from saturn_airflow.model.errors import DeviceError, JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding import first_steps
from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.samples import samples
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.losses import decompose
from saturn_airflow.training.ranks import Ranks


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB.", "out_of_memory"),
        ("CUDA error: out of memory", "out_of_memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "out_of_memory"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "out_of_memory"),
        ("cuFFT error: CUFFT_ALLOC_FAILED", "out_of_memory"),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `x`", "out_of_memory"),
        # On a part of a GPU, where NVML does not tell who has its memory.
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/CUDACachingAllocator.cpp":1154',
            "out_of_memory",
        ),
        ("CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA`", "lost"),
        ("CUDA error: an illegal memory access was encountered", "lost"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "lost"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", "lost"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "lost"),
        ("NCCL Error 1: unhandled cuda error: CUDA error: unspecified launch failure", "lost"),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", "lost"),
        ("CUDA error: device-side assert triggered", "failed"),
        # Who names a GPU, as "cuda:1", that the job does not have.
        ("CUDA error: invalid device ordinal", "failed"),
        ("CUDA error: invalid configuration argument", "failed"),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", "failed"),
        ("my parser met an unknown error", "failed"),
    ],
)
def test_texts(text: str, status: str) -> None:
    raised = RuntimeError(text)
    assert failures.describe(raised).status == status
    job_error = JobError(f"the model's forward pass raised: {text}")
    job_error.__cause__ = raised
    told = failures.describe(job_error)
    assert told.status == status
    assert (told.whose == "job") is (status == "failed")


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("CUDA error: GPU is lost", "device"),
        ("No CUDA GPUs are available", "device"),
        ("CUDA error: uncorrectable ECC error encountered", "device"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "device"),
        (
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices()? Error 802: system not yet initialized. CUDA is not usable",
            "device",
        ),
        ("The NVIDIA driver on your system is too old (found version 12020). Please update CUDA", "device"),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "device"),
        ("CUDA driver initialization failed, you might not have a CUDA gpu.", "device"),
        ("CUDA error: system has unsupported display driver / cuda driver combination", "device"),
        ("CUDA error: MPS server is not ready to accept new MPS client requests", "device"),
        ("CUDA error: no kernel image is available for execution on the device", ""),
        ("CUDA error: an illegal memory access was encountered", ""),
        ("CUDA error: unspecified launch failure", ""),
    ],
)
def test_no_code_is_to_blame_for_hardware(text: str, whose: str) -> None:
    job_error = JobError(f"the model's forward pass raised: {text}")
    job_error.__cause__ = RuntimeError(text)
    assert failures.describe(job_error).whose == whose


@pytest.mark.parametrize(
    ("raised", "status", "whose"),
    [
        (
            RuntimeError("CUDA error: invalid device ordinal\nGPU device may be out of range"),
            "lost",
            "device",
        ),
        (AssertionError("Torch not compiled with CUDA enabled"), "lost", "device"),
        (RuntimeError("CUDA error: no kernel image is available for execution"), "lost", "device"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory", ""),
    ],
)
def test_a_gpu_that_no_job_could_use(
    raised: Exception, status: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise raised

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(DeviceError) as met:
        ranks_module._take(torch.device("cuda", 1))
    told = failures.describe(met.value, rank=1)
    assert (told.status, told.whose, told.rank) == (status, whose, 1)
    first = str(raised).partition("\n")[0]
    if whose:
        assert told.reason == f"GPU 1 of those of this run can't be used: {type(raised).__name__}: {first}"


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out_of_memory"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "lost"),
        (ValueError("fewer than four samples"), "does_not_fit"),
    ],
)
def test_what_the_machine_met_says_nothing_of_a_technique(raised: Exception, status: str) -> None:
    """Whatever the technique was about to say of it: it would be remembered, others not tried."""
    job_error = JobError(f"the model raised {raised}")
    job_error.__cause__ = raised
    for cause in (raised, job_error):
        refused = DoesNotFit(f"it can't train what one device can: {raised}")
        refused.__cause__ = cause
        told = failures.describe(refused)
        assert told.status == status
        assert str(raised) in told.reason


def test_without_memory_for_a_look_no_rule_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decompose, "_evaluate", evaluate)
    nothing: Any = SimpleNamespace(wants_example=False, shares=2, pieces=1)
    objective: Any = SimpleNamespace(exactly=lambda: objective, take=lambda data, *rows: MicroBatch(data, 2))
    cuts = decompose.Cuts("ddp on 2 devices", False, 2)
    with pytest.raises(torch.OutOfMemoryError):
        decompose.find_rule(nothing, objective, MicroBatch(None, 8), cuts, lambda parallel: nullcontext())


def test_an_index_out_of_range_is_the_jobs_wherever_a_gpu_tells_it() -> None:
    raised = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")
    wrapped = JobError(f"the model raised RuntimeError: {raised}")
    wrapped.__cause__ = raised
    for error in (raised, wrapped):
        told = failures.describe(error)
        assert (told.status, told.whose) == ("failed", "job")
        assert "such as a label that is no class" in told.reason


def test_a_gpu_that_fell_off_the_bus_is_no_fault_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*asked: Any) -> Any:
        raise DeviceError("1 more does not answer")

    monkeypatch.setattr(devices, "find", find)
    monkeypatch.setattr(descendants, "adopt", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    spec = spec_for(tmp_path, small_job(), kind="a100")
    Path(spec.folder).mkdir()
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    Supervisor(tmp_path, None).run()
    *_, end = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (end["status"], end["whose"], end["reason"]) == ("failed", "device", "1 more does not answer")


def test_what_nccl_has_met_is_told() -> None:
    text = (
        "NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error (NCCL_DEBUG=INFO for details)"
        "\nncclSystemError: System call or external library call failed or device error. \nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), error: No space left"
    )
    assert failures.describe(RuntimeError(text)).reason.endswith(
        "for details): Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), "
        "error: No space left"
    )


@pytest.mark.parametrize(
    ("ends", "count"),
    [
        ([("device", 0), ("device", 60), ("device", 1799)], 0),
        ([("device", 0), ("device", 60), ("device", 1801), ("device", 2101)], 2),
        ([("device", 0), ("", 60), ("device", 1801), ("device", 2101)], 1),
        ([("", 0), ("", 1)], 2),
    ],
)
def test_a_gpu_that_fails_for_half_an_hour_counts(
    tmp_path: Path, ends: list[tuple[str, float]], count: int
) -> None:
    spec = json.dumps(spec_for(tmp_path, small_job()).to_dict())
    for number, (whose, seconds) in enumerate(ends):
        folder = tmp_path / "runs" / f"{number:04}"
        folder.mkdir(parents=True)
        (folder / "alive").touch()
        (folder / "spec.json").write_text(spec)
        end = {"event": "end", "time": 1e9 + seconds, "status": "lost", "whose": whose, "reason": ""}
        (folder / "events.jsonl").write_text(json.dumps(end) + "\n")
    assert past_runs.failures(tmp_path) == count


def test_what_torch_says_of_an_operation_is_told_without_its_list() -> None:
    with pytest.raises(NotImplementedError) as raised:
        torch.zeros(2, 2).to_sparse().view(4)
    assert "only available for these backends" in str(raised.value)
    told = failures.describe(raised.value).reason
    assert told.startswith("NotImplementedError: Could not run 'aten::view'")
    assert told.endswith("backend.")


def test_what_ran_out_of_memory_holds_none_while_less_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def take_each(plain: first_steps.PlainSteps, *unused: Any) -> None:
        if not held:
            activations = torch.zeros(3)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")
        alive.append(held[0]() is not None)
        plain.steps.append(Step(1.0, None, samples({"weight": torch.ones(1)}), {}, {}, {}, frozenset()))

    monkeypatch.setattr(first_steps, "take_each", take_each)
    job = Job("j", "x:y", "x:y", "x:y")
    ranks = Ranks(rank=0, size=1, device=torch.device("cuda", 0))
    gc.disable()
    try:
        nothing: Any = None
        found = first_steps.take(job, nothing, nothing, ranks, nothing, None, whole_batch=True)
    finally:
        gc.enable()
    assert found.steps
    assert alive == [False]
