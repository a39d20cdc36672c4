"""The GPU benchmark runs, on a CPU with tiny models; what it finds there says nothing about speed."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1400)]


def dry_run(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the benchmark writes and prints where there is nothing but torch and transformers."""
    for name in ("airflow", "mlflow", "pyomo", "highspy", "numba", "pynvml", "rich"):
        text = f"raise ModuleNotFoundError('the benchmark imports {name}')"
        (folder / f"{name}.py").write_text(text)
    output = folder / "gpu.json"
    command = [sys.executable, str(BENCHMARK), "--dry-run", "--minutes", "15", "--output", str(output)]
    command += arguments
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["left_out"] == []
    assert min(result["ceilings"].values()) > 0
    for row in result["losses_against_float64"]:
        assert row["worst"] < {"float64": 1e-12, "float32": 1e-4, "bf16": 0.1}[row["precision"]], row
    return result, done.stdout


def assert_measured(row: dict[str, Any], printed: str) -> None:
    assert "failed" not in row, row
    assert row["tokens_per_second"] > 0
    assert row["case"] in printed
    assert {"forward", "backward", "optimizer", "rest"} <= row["phases"].keys()
    assert sum(row["phases"].values()) < 1.5 * row["seconds_per_batch"]


def test_one_case_runs_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    result, printed = dry_run(tmp_path, "--only", "6B, spill, clipped")
    (row,) = result["cases"]
    assert_measured(row, printed)


@pytest.mark.nightly
def test_all_cases_run_and_are_held_against_each_other(tmp_path: Path) -> None:
    result, printed = dry_run(tmp_path)
    assert result["cases"][0]["case"] == "1.5B, plain"
    (deepspeed,) = (row for row in result["cases"] if row["technique"].startswith("DeepSpeed"))
    assert (deepspeed["failed"], deepspeed["why"]) == ("left out", "it is held against on GPUs alone")
    for row in (row for row in result["cases"] if row is not deepspeed):
        assert_measured(row, printed)
    off = {row["case"]: row["losses_off"] for row in result["cases"] if "losses_off" in row}
    assert off["6B, spill"] < 1e-2
    assert max(off.values()) < 5e-2, off
    assert "6B, spill / 6B, plain FSDP2, offloaded" in result["times_as_fast"]


@pytest.fixture
def gpu_cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the table's rows."""
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    return importlib.import_module("gpu_cases")


@pytest.mark.parametrize(
    ("gib", "batch", "layers", "llama_layers"),
    [(139.8, 16, 30, 24), (79.1, 8, 19, 19), (23.6, None, 3, 3)],
    ids=["H200", "H100", "24 GB"],
)
def test_rows_are_of_what_the_gpu_holds(
    gib: float, batch: int | None, layers: int, llama_layers: int, gpu_cases: Any
) -> None:
    memory, host = gib * 2**30, 126 * 2**30
    shapes = gpu_cases.sizes(memory, 16, 12)
    rows = {
        row.name: row
        for row in gpu_cases.cases(
            shapes, [4, 8, 24], functools.partial(gpu_cases.in_memory, device_bytes=memory)
        )
    }
    whole = layers == 30
    name = "6B" if whole else f"6B ({layers} of 30 layers)"
    held, spilled = rows[f"{name}, plain, recomputed"], rows[f"{name}, spill"]
    small = rows.pop("1.5B, single")
    assert small.shape.batch_size == (batch or 2)
    assert (small.why_not(memory, host) is None) is (batch is not None)
    assert held.shape == spilled.shape
    assert held.shape.layers == layers
    assert rows["6B, spill"].shape.layers == 30
    # What is held against another has its shape, and all of it fits as far as is told before it is tried.
    for row in rows.values():
        assert "1.5B" in row.name or row.why_not(memory, host) is None, row
        for other in row.faster_than:
            assert rows[other].shape == row.shape
        if row.against:
            assert rows[row.against].shape == row.shape
    assert "6B, plain FSDP2, offloaded" in rows["6B, spill"].faster_than
    assert {row.shape.layers for row in rows.values() if "Llama" in row.name} == {llama_layers}


def test_what_does_not_fit_is_left_out_with_the_reason(gpu_cases: Any) -> None:
    shapes = gpu_cases.sizes(80 * 2**30, 16, 12)
    case = gpu_cases.Case
    large = case("large", shapes["large"], "plain, recomputed")
    assert large.why_not(80 * 2**30, 2**40) == "it takes about 104 GiB of the GPU's 80"
    spilled = case("large", shapes["large"], "spill")
    assert spilled.why_not(2**30, 2**40) is None
    told = "it takes about 101 GiB of host memory, 64 are available"
    assert spilled.why_not(80 * 2**30, 64 * 2**30) == told


def test_a_row_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    gpu, gpu_cases = importlib.import_module("gpu"), importlib.import_module("gpu_cases")
    machine = gpu.Machine("here", "cpu", 1e12, None)
    row = gpu.measure(gpu_cases.Case("x", gpu_cases.tiny_sizes()["small"], "single"), machine, 0.0)
    assert (row["failed"], row["why"]) == ("hung", "it took longer than 0 s")


def test_out_of_capped_memory_is_measured_with_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    gpu, gpu_cases = importlib.import_module("gpu"), importlib.import_module("gpu_cases")

    def measure(case: Any, *unused: Any) -> dict[str, Any]:
        row = {"case": case.name, "cap_gib": case.cap and case.cap / 2**30}
        if case.cap == 16 * 2**30 or "plain" in case.name:
            return {**row, "failed": "out_of_memory", "why": "too little"}
        return {**row, "tokens_per_second": 1.0, "losses": [1.0]}

    def fails(*unused: Any) -> Any:
        raise gpu.TooLongError

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(gpu, "deviations", fails)
    rows = gpu_cases.cases(gpu_cases.tiny_sizes(), [2], lambda shape: shape)[:4]
    result: dict[str, Any] = {"cases": [], "left_out": []}
    gpu.run_all(rows, gpu.Machine("here", "cpu", 1e12, None), 1e12, result, tmp_path / "found.json")
    found = {row["case"]: row for row in json.loads((tmp_path / "found.json").read_text())["cases"]}
    assert found["6B, spill"]["cap_gib"] == 24
    assert found["6B, spill"]["out_of_memory_within_gib"] == 16
    assert found["6B, plain, recomputed"]["failed"] == "out_of_memory"
    assert result["left_out"] == ["losses against float64: TooLongError "]
    gpu.run_all(rows, gpu.Machine("here", "cpu", 1e12, None), 0.0, result, tmp_path / "found.json")
    assert result["left_out"][1:5] == [row.name for row in rows]


def test_losses_of_a_small_model_end_with_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    gpu, gpu_cases = importlib.import_module("gpu"), importlib.import_module("gpu_cases")
    monkeypatch.setattr(gpu.launching, "launch_ranks", lambda *unused, poll, **settings: poll())
    with pytest.raises(gpu.TooLongError):
        gpu.deviations(gpu_cases.tiny_sizes()["small"], "cpu", 0.0)


def test_deepspeed_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    why_not = importlib.import_module("gpu_deepspeed").why_not
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not("cuda") == (
        "deepspeed is not installed (pip install deepspeed; it compiles its Adam with nvcc)"
    )


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no CUDA GPU is visible; --dry-run runs tiny models on the CPU" in done.stderr
