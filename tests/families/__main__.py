"""``python -m families``: run the matrix or a part of it; say what is exact, refused, wrong, or raised."""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from families import report
from families.launches import run
from families.matrix import Cell, all_cells, row_of
from families.verdicts import Result


def main() -> int:
    """Run what is asked for; 1 where a cell is neither exact nor refused."""
    given = _arguments().parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="families-") as scratch:
        given.results = given.results or Path(scratch, "results.jsonl")
        given.results.parent.mkdir(parents=True, exist_ok=True)
        if given.jobs > 1:
            _run_shards(given)
        else:
            _run(_chosen(given), given.results, Path(scratch))
        rows = read(given.results)
    print(report.summary(rows))
    if given.write:
        report.write(rows)
    return int(any(row["verdict"] in report.BAD for row in rows))


def read(results: Path) -> list[dict[str, Any]]:
    """The newest result of each cell, in the order of the matrix."""
    found = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        row = json.loads(line)
        # Where in torch it came from has paths of the machine.
        found[row["cell"]] = row | {"why": row["why"].partition("\nTraceback")[0]}
    return [row_of(cell) | found[cell.name] for cell in all_cells() if cell.name in found]


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m families", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that the names of cells must match")
    parser.add_argument("--sample", type=int, help="take so many cells by chance, all techniques alike")
    parser.add_argument("--seed", type=int, default=0, help="of that chance")
    parser.add_argument("--also", help="take those cells too whose names match this")
    parser.add_argument("--shard", default="0/1", help="the part of the cells to run, such as 0/4")
    parser.add_argument("--jobs", type=int, default=1, help="parts to run side by side")
    parser.add_argument(
        "--results", type=Path, help="lines of JSON; cells that are there already are not run again"
    )
    parser.add_argument("--write", action="store_true", help="write the committed table and its page")
    return parser


def _chosen(given: argparse.Namespace) -> list[Cell]:
    cells = [cell for cell in all_cells() if re.search(given.only, cell.name)]
    if given.sample is not None:
        also = [cell for cell in cells if given.also and re.search(given.also, cell.name)]
        cells = [*also, *(cell for cell in sample(cells, given.sample, given.seed) if cell not in also)]
    shard, shards = map(int, given.shard.split("/"))
    done = {row["cell"] for row in read(given.results)}
    # A family's cells stay together: they share their truths.
    number_of = {name: number for number, name in enumerate(dict.fromkeys(c.recipe.family for c in cells))}
    own = [cell for cell in cells if number_of[cell.recipe.family] % shards == shard]
    return [cell for cell in own if cell.name not in done]


def sample(cells: list[Cell], count: int, seed: int) -> list[Cell]:
    """``count`` of the cells, of each technique about as many."""
    chance = random.Random(seed)
    by_technique = [
        [cell for cell in cells if cell.strategy.technique == technique] for technique in report.TECHNIQUES
    ]
    for group in by_technique:
        chance.shuffle(group)
    rounds = [
        [group[i] for group in by_technique if i < len(group)] for i in range(max(map(len, by_technique)))
    ]
    return [cell for chosen in rounds for cell in chosen][:count]


def _run(cells: list[Cell], results: Path, folder: Path) -> None:
    state = _state_of_the_code()

    def note(cell: Cell, result: Result) -> None:
        row = row_of(cell) | vars(result) | {"state": state}
        with results.open("a") as file:
            print(json.dumps(row), file=file)
        if result.verdict in report.BAD:
            off = [f"{number:.1e}" for number in (result.losses, result.weights) if number is not None]
            print(result.verdict, cell.name, *off, result.why[-300:], file=sys.stderr, flush=True)

    run(cells, folder / "cells", note)


def _state_of_the_code() -> str:
    """The commit that cells are run at; with a ``+`` where files of the package have changed since."""
    told = ["git", "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty=+"]
    found = subprocess.run(told, cwd=report.ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _run_shards(given: argparse.Namespace) -> None:
    """Run parts side by side; each adds its cells to the results as they come, so that none is lost."""
    parts = []
    for shard in range(given.jobs):
        command = [sys.executable, "-m", "families", "--only", given.only, "--shard", f"{shard}/{given.jobs}"]
        command += ["--results", str(given.results)]
        command += ["--sample", str(given.sample), "--seed", str(given.seed)] if given.sample else []
        parts.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    for part in parts:
        part.wait()


if __name__ == "__main__":
    sys.exit(main())
