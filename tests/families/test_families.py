"""A sample of the matrix of families; ``make test-families`` runs all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from families.__main__ import read

ROOT = Path(__file__).resolve().parents[2]
SEED, CELLS = 20, 30

#: Cells that were silently wrong or lost the job once: exact now, or refused because of this.
ONCE_WRONG = {
    "t5: ddp on 3": "",
    "bert, masked by the collator: single on 1 (accumulate=2)": "",
    "bert, next sentence: single on 1": "",
    "rnn, time first, said so: ddp on 3": "",
    "rnn, time first: ddp on 3": "batch_dim",
    "experts of several shapes: single on 1": "",
    "experts of several shapes: fsdp on 2": "",
    "convolutions, channels last: single on 1": "",
    "unused parameters: spill on 1": "",
    "spectral norm: spill on 1": "",
    "blocks that return pairs: pipeline on 2": "",
    "embedding, sparse: single on 1": "",
    "embedding, sparse: fsdp on 2": "sparse gradients",
    "llama, a loss function, Rprop: fsdp on 2": "split over devices",
    "segformer, pixels: ddp on 3": "",
    "ghost batch norm: fsdp on 2": "the loss of step 4",
    "conditional random field: pipeline on 2": "",
    "deepseek-v3: tensor on 2": "",
    "equilibrium: fsdp on 2": "let go of them",
    "a block used three times: fsdp on 2": "",
    "funnel: fsdp on 2": "",
    "reformer: pipeline on 2": "leave that to pipeline",
    "doge: tensor on 2": "can't train what one device can",
    "blocks with a plan, Muon: fsdp on 2, then fsdp on 2": "",
    "sparse inputs: ddp on 3": "",
    "mixture density: fsdp on 2": "",
    "compiled by block: spill on 1": "",
}
# Where a model makes its batch's parts another thing than the whole, no technique that cuts it can be exact.
REFUSED = {"clip: ddp on 3", "mixtral: fsdp on 2", "contrastive loss: pipeline on 2"}

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of the cells, by name."""
    results = tmp_path_factory.mktemp("families") / "results.jsonl"
    named = "|".join(f"^{name.replace('(', '[(]').replace(')', '[)]')}$" for name in [*ONCE_WRONG, *REFUSED])
    command = [sys.executable, "-W", "ignore", "-m", "families", "--results", str(results)]
    command += ["--sample", str(CELLS), "--seed", str(SEED), "--also", named]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    told = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert results.exists(), told.stderr[-2000:]
    return {row["cell"]: row for row in read(results)}


@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_exact_or_refused(rows: dict[str, dict[str, Any]], figure: Callable[[str], None]) -> None:
    counts = Counter(row["verdict"] for row in rows.values())
    assert sum(counts.values()) >= CELLS
    bad = {name: row["why"] for name, row in rows.items() if row["verdict"] in ("wrong", "error")}
    assert not bad
    mistaken = [name for name, row in rows.items() if row["guard"] == "mistaken"]
    assert not mistaken, "the guard refuses what is exact"
    figure(f"{counts['exact']} cells exact, {counts['refused']} refused, {counts['drawn']} drawn otherwise")


@pytest.mark.ranks
@pytest.mark.parametrize("name", ONCE_WRONG)
def test_once_wrong(name: str, rows: dict[str, dict[str, Any]]) -> None:
    reason, row = ONCE_WRONG[name], rows[name]
    assert row["verdict"] == ("refused" if reason else "exact"), row["why"]
    assert reason in row["why"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_reason(name: str, rows: dict[str, dict[str, Any]]) -> None:
    assert rows[name]["verdict"] == "refused"
    assert rows[name]["why"]
