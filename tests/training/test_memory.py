"""Host memory as trials report it: what CUDA pins counts, whether or not the driver shows it as resident."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from saturn_airflow.training import memory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("shown", "beside"), [(True, 0), (False, 3 << 30)])
def test_what_is_pinned_counts_once(shown: bool, beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"allocated_bytes.current": 1 << 30, "allocated_bytes.peak": 3 << 30}
    alone, now = memory.peak_host_bytes(), memory.host_bytes()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: taken)
    monkeypatch.setattr(memory, "_shows_pinned", lambda: shown)
    assert memory.peak_host_bytes() - alone == pytest.approx(beside, abs=1 << 28)
    assert memory.host_bytes() - now == pytest.approx(beside / 3, abs=1 << 28)


def test_nothing_is_asked_of_cuda_where_it_is_not_used() -> None:
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert 0 < memory.host_bytes() <= memory.peak_host_bytes()


@pytest.mark.parametrize(
    ("said", "found"), [(None, "expandable_segments:True"), ("max_split_size_mb:64", "max_split_size_mb:64")]
)
def test_segments_grow_unless_the_environment_says_otherwise(said: str | None, found: str) -> None:
    environment = {name: v for name, v in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment |= {} if said is None else {"PYTORCH_CUDA_ALLOC_CONF": said}
    code = (
        "import torch; from saturn_airflow.training import memory; memory.grow_segments(); "
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == found, done.stderr


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.95), (0.5, 0.5)])
def test_a_trial_leaves_some_of_a_gpus_memory(
    before: float, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: before)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: set_to.append(part)
    )
    memory.leave_headroom(torch.device("cuda", 0))
    memory.leave_headroom(torch.device("cpu"))
    assert set_to == [after]
