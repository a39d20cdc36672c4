"""The GPU benchmark runs, on a CPU with tiny models; what it finds there says nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.ranks


def test_dry_run(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARK), "--dry-run", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(output.read_text())
    assert result["cases"][0]["case"] == "single, 1.5B"
    for row in result["cases"]:
        assert "failed" not in row, row
        assert row["tokens_per_second"] > 0
        assert row["case"] in done.stdout
    assert set(result["spilled_times_as_fast_as"]) == {"in memory", "FSDP2 offloaded"}
    for row in result["losses_against_float64"]:
        assert row["worst"] < {"float64": 1e-12, "float32": 1e-4, "bf16": 0.1}[row["precision"]], row


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no CUDA GPU is visible; --dry-run runs tiny models on the CPU" in done.stderr
