"""What errors of a GPU mean for the job that meets them, by the texts that CUDA and torch give them."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from running import small_job, spec_for

from saturn_airflow.launch import failures, past_runs
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.guarding import first_steps
from saturn_airflow.training.ranks import Ranks


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB.", "out_of_memory"),
        ("CUDA error: out of memory", "out_of_memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "out_of_memory"),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `x`", "out_of_memory"),
        ("CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA`", "lost"),
        ("CUDA error: an illegal memory access was encountered", "lost"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "lost"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`", "lost"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "lost"),
        ("NCCL Error 1: unhandled cuda error: CUDA error: unspecified launch failure", "lost"),
        ("CUDA error: device-side assert triggered", "failed"),
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
        plain.steps.append(Any)  # type: ignore[arg-type]

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
