"""Planning problems of kinds that benchmarks/instances does not have, drawn with a seed each.

Wide nodes, one large node, nodes of several sizes, many nodes, devices of two kinds, jobs that are released
late or bound to some of the nodes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any


def problems() -> list[dict[str, Any]]:
    """Problem files, as docs/planner.md describes them."""
    kinds = {"h200": 2.1, "a100": 1.0}
    return [
        _problem("wide-2x16", _alike(2, 16), 40, widths=(1, 2, 4, 8, 16)),
        _problem("wide-all-2x16", _alike(2, 16), 40, widths=range(1, 17)),
        _problem("one-8", _alike(1, 8), 40),
        _problem("many-50x8", _alike(50, 8), 300),
        _problem("sizes-8-4-2-1", [("a100", width) for width in (8, 4, 2, 1)], 30),
        _problem("sizes-16-1", [("a100", 16), ("a100", 1)], 24, widths=(1, 2, 4, 8, 16)),
        _problem("kinds-4x8", [(kind, 8) for kind in kinds for _ in range(2)], 30, kinds=kinds),
        _problem("bound-4x8", _alike(4, 8), 40, bound=0.5),
        _problem("released-4x8", _alike(4, 8), 80, released=0.6),
        _problem("released-2x8", _alike(2, 8), 20, released=0.5),
    ]


def _alike(nodes: int, devices: int) -> list[tuple[str, int]]:
    return [("a100", devices)] * nodes


def _problem(
    name: str,
    nodes: list[tuple[str, int]],
    jobs: int,
    *,
    widths: Iterable[int] = (1, 2, 4, 8),
    kinds: dict[str, float] | None = None,
    bound: float = 0.0,
    released: float = 0.0,
) -> dict[str, Any]:
    """Jobs of 300 to 6,000 seconds on one device, and k^0.6 to k^0.95 times as fast on k, 8 % more or less;
    two of five need two or four devices at least.

    :param nodes: the kind and the devices of each.
    :param kinds: how fast each kind of device is.
    :param bound: share of the jobs that are bound to half of the nodes.
    :param released: share of the jobs that are released later, up to when nine tenths of the least that all
        devices are busy would be over.
    """
    chance = random.Random(name)
    on = [{"name": f"node{n}", "devices": width, "kind": kind} for n, (kind, width) in enumerate(nodes)]
    drawn: list[dict[str, Any]] = []
    for number in range(jobs):
        alone, power = chance.uniform(300, 6000), chance.uniform(0.6, 0.95)
        least = chance.choice((1, 1, 1, 2, 4))
        seconds = {g: alone / g**power * chance.uniform(0.92, 1.08) for g in widths if g >= least}
        job: dict[str, Any] = {
            "name": f"job{number}",
            "strategies": [
                {
                    "technique": "fsdp",
                    "devices": g,
                    "seconds": {kind: round(s / fast) for kind, fast in (kinds or {"a100": 1.0}).items()},
                }
                for g, s in seconds.items()
            ],
        }
        if chance.random() < bound:
            job["nodes"] = sorted(node["name"] for node in chance.sample(on, len(on) // 2))
        drawn.append(job)
    busy = sum(min(s["devices"] * s["seconds"]["a100"] for s in job["strategies"]) for job in drawn)
    last = 0.9 * busy / sum(width for _, width in nodes)
    for job in drawn:
        if chance.random() < released:
            job["release"] = round(chance.uniform(0, last))
    return {"name": name, "nodes": on, "jobs": drawn}
