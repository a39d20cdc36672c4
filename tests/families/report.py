"""The matrix as a committed file and as a page of the documentation."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "families.md"
TECHNIQUES = ("single", "ddp", "fsdp", "tensor", "pipeline", "spill")
BAD = ("wrong", "error")

Row = dict[str, Any]


def shares(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """How many cells of each technique have which verdict."""
    counts: dict[str, Counter[str]] = {technique: Counter() for technique in TECHNIQUES}
    for row in rows:
        counts[row["technique"]][row["verdict"]] += 1
    return counts


def reasons(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The refused cells of each technique and reason; names and numbers that differ are left open."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        # Of what is resumed either of two techniques may refuse, and does so where nothing is resumed too.
        if row["verdict"] == "refused" and ", then " not in row["cell"]:
            found[f"{row['technique']}: {in_general(row['why'])}"].append(row["cell"])
    return dict(
        sorted(found.items(), key=lambda item: (TECHNIQUES.index(item[0].split(":")[0]), -len(item[1])))
    )


def in_general(reason: str) -> str:
    """A reason without the names and numbers of one model."""
    reason = re.sub(r"(?<!\w)'[^']*'(?!\w)", "'…'", reason.splitlines()[0] if reason else "")
    reason = re.sub(r"^\w+(?= can't|'s plan)", "the model", reason)
    reason = re.sub(r"^.*changes the result: .*", "the guard finds that it changes the result", reason)
    reason = re.sub(r"\(aten\..*\)", "(…)", reason)
    reason = re.sub(r"^\S+(?= is a )", "'…'", reason)
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "n", reason)


def summary(rows: list[Row]) -> str:
    """What the command prints: the share of exact cells of each technique, and refusals by reason."""
    lines = []
    for technique, counts in shares(rows).items():
        cells = sum(counts.values())
        if cells:
            others = ", ".join(
                f"{number} {verdict}" for verdict, number in sorted(counts.items()) if verdict != "exact"
            )
            lines.append(
                f"{technique}: {counts['exact']} of {cells} exact ({counts['exact'] / cells:.0%}); {others}"
            )
    lines += [f"refused {len(cells):4}  {reason}" for reason, cells in reasons(rows).items()]
    mistaken = [row["cell"] for row in rows if row.get("guard") == "mistaken"]
    lines += [f"the guard refuses what is exact: {cell}" for cell in mistaken]
    lines += [
        f"{row['verdict'].upper()} {row['cell']}: {row['why']}" for row in rows if row["verdict"] in BAD
    ]
    return "\n".join(lines)


def page(rows: list[Row]) -> str:
    """The documentation's page: families by technique, and why what is refused is."""
    numbers = {reason: number for number, reason in enumerate(reasons(rows), 1)}
    parts = [_HEAD.format(cells=len(rows), families=len({row["family"] for row in rows}))]
    parts.append("| technique | cells | exact | refused | drawn otherwise |\n| --- | --- | --- | --- | --- |")
    for technique, counts in shares(rows).items():
        parts[-1] += (
            f"\n| `{technique}` | {sum(counts.values())} | {counts['exact']} "
            f"| {counts['refused']} | {counts['drawn']} |"
        )
    parts.append(_states(rows))
    own = [row for row in rows if row["group"] == "family"]
    kinds = dict.fromkeys(row["kind"] for row in own)
    for kind in kinds:
        parts.append(
            f"## {kind.capitalize()}\n{_table([row for row in own if row['kind'] == kind], numbers)}"
        )
    parts.append("## Optimizers, and resuming\n" + _others([row for row in rows if row["group"] != "family"]))
    listed = "\n".join(
        f"{number}. `{reason.split(':')[0]}`:{reason.split(':', 1)[1]}" for reason, number in numbers.items()
    )
    parts.append(f"## Why\n{listed}")
    return "\n\n".join(parts) + "\n"


def _table(rows: list[Row], numbers: dict[str, int]) -> str:
    lines = [f"| family | {' | '.join(TECHNIQUES)} |", "| --- " * (len(TECHNIQUES) + 1) + "|"]
    for family in dict.fromkeys(row["family"] for row in rows):
        cells = []
        for technique in TECHNIQUES:
            of = [row for row in rows if row["family"] == family and row["technique"] == technique]
            cells.append(_cell(of, numbers))
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rows: list[Row], numbers: dict[str, int]) -> str:
    """``exact``, or for which strategies it is not, and why."""
    told = []
    for row in rows:
        if row["verdict"] == "refused":
            told.append(f"refused ({numbers[row['technique'] + ': ' + in_general(row['why'])]})")
        else:
            told.append("drawn otherwise" if row["verdict"] == "drawn" else str(row["verdict"]))
    counts = Counter(told)
    if len(counts) == 1:
        return told[0]
    return ", ".join(f"{text} {number} of {len(rows)}" for text, number in counts.items())


def _states(rows: list[Row]) -> str:
    """How many cells were last run at which state of the code."""
    counts = Counter(row.get("state", "") for row in rows)
    told = [f"{number} at {state}" for state, number in counts.items() if state]
    earlier = f"; {counts['']} at earlier states, when cells did not say so" if counts[""] else ""
    return f"Last run, by the commit of the code: {', '.join(told) or 'none'}{earlier}."


def _others(rows: list[Row]) -> str:
    lines = ["| what | cells | exact | refused |", "| --- | --- | --- | --- |"]
    for group in dict.fromkeys(row["label"] for row in rows):
        of = Counter(row["verdict"] for row in rows if row["label"] == group)
        lines.append(f"| {group} | {sum(of.values())} | {of['exact']} | {of['refused']} |")
    return "\n".join(lines)


_HEAD = """# Model families

What was tried: {families} families of models, each under every technique, next to a plain PyTorch loop that
knows nothing of Saturn; {cells} cells in all. `make test-families` runs them again and writes this page.
Batches are of 5, 5 and 1 samples (of 5, 5 and 4 where BatchNorm needs several), so shares are unequal and one
is empty; weights are in float64.

* *Exact*: losses and weights agree with the plain loop to 1e-9, or to 1e-5 where the model itself computes in
  float32.
* *Refused*: the trial says why, by the numbers at the end of this page, and the plan does without that
  technique. `refused (3) 1 of 2`: of two strategies with that technique, such as on two devices and on three,
  or with `accumulate`, one is. A trial searches, which these cells do not: where a reason names
  `by_block=False`, it goes on with that.
  What the guard refuses was trained all the same, to see that it is right.
* *Drawn otherwise*: the model draws random numbers, and several devices draw others than one device does.
  These are compared with `single`, since a plain loop can't know what is drawn."""


def write(rows: list[Row]) -> None:
    """Write the committed file and the page made of it."""
    RESULTS.write_text(json.dumps({"cells": rows}, indent=0, sort_keys=True) + "\n")
    PAGE.write_text(page(rows))
