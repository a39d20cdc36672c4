"""The GPU benchmark runs, on a CPU with tiny models; what it finds there says nothing about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(700)]


def test_dry_run_without_airflow_mlflow_or_pyomo(tmp_path: Path) -> None:
    for name in ("airflow", "mlflow", "pyomo"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the benchmark imports {name}')")
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARK), "--dry-run", "--output", str(output)]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(output.read_text())
    assert result["cases"][0]["case"] == "1.5B, plain"
    assert result["left_out"] == []
    assert min(result["ceilings"].values()) > 0
    (deepspeed,) = (row for row in result["cases"] if row["technique"].startswith("DeepSpeed"))
    assert (deepspeed["failed"], deepspeed["why"]) == ("left out", "it is held against on GPUs alone")
    for row in (row for row in result["cases"] if row is not deepspeed):
        assert "failed" not in row, row
        assert row["tokens_per_second"] > 0
        assert row["case"] in done.stdout
        assert {"forward", "backward", "optimizer", "rest"} <= row["phases"].keys()
        assert sum(row["phases"].values()) < 1.5 * row["seconds_per_batch"]
    off = {row["case"]: row["losses_off"] for row in result["cases"] if "losses_off" in row}
    assert off["6B, spill"] < 1e-2
    assert max(off.values()) < 5e-2, off
    assert "6B, spill / 6B, plain FSDP2, offloaded" in result["times_as_fast"]
    for row in result["losses_against_float64"]:
        assert row["worst"] < {"float64": 1e-12, "float32": 1e-4, "bf16": 0.1}[row["precision"]], row


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no CUDA GPU is visible; --dry-run runs tiny models on the CPU" in done.stderr
