from __future__ import annotations

import warnings
from xml.etree import ElementTree

import pytest

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.tracking import chart


def texts(svg: bytes) -> list[str]:
    return [
        "".join(e.itertext()).strip() for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")
    ]


def plan(*assignments: Assignment, bound: float = 0.0) -> Plan:
    return Plan("p", "makespan", max(a.end for a in assignments), bound, 0.1, assignments)


def test_each_job_and_device_is_named_and_the_bound_is_told() -> None:
    svg = chart.draw(
        plan(
            Assignment("left", "ddp", 2, "gpu-a", (0, 1), 0, 50),
            Assignment("right", "fsdp", 1, "gpu-a", (1,), 50, 100),
            bound=80,
        ),
        "svg",
        [Node("gpu-a", 2), Node("idle", 1)],
    )
    found = texts(svg)
    for text in ("left", "right", "gpu-a:0", "gpu-a:1", "idle:0", "ddp", "fsdp", "makespan 100 s"):
        assert text in found
    assert "no plan can end before 80 s" in found
    assert "2 jobs in 100 s, gap 25.0%: p" in found


def test_without_a_cluster_the_devices_of_the_plan_are_the_rows() -> None:
    found = texts(chart.draw(plan(Assignment("j", "ddp", 2, "n", (1, 3), 0, 5)), "svg"))
    assert {text for text in found if text.startswith("n:")} == {"n:1", "n:3"}


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$\\frac{1}{0}$", "a$b", "模型", "&amp;"])
def test_names_are_shown_as_they_are(name: str) -> None:
    job = Assignment(name, "ddp", 1, "n", (0,), 0, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name in texts(chart.draw(plan(job), "svg"))
        assert chart.draw(plan(job), "png").startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_large_plan_stays_a_picture_one_can_look_at() -> None:
    nodes = [Node(f"gpu-{n:02}", 8) for n in range(32)]
    jobs = [
        Assignment(
            f"gpt2-{n}", "ddp", 8, f"gpu-{n % 32:02}", tuple(range(8)), n // 32 * 60, n // 32 * 60 + 60
        )
        for n in range(200)
    ]
    png = chart.draw(plan(*jobs), "png", nodes)
    width, height = (int.from_bytes(png[16 + 4 * n : 20 + 4 * n], "big") for n in (0, 1))
    assert width <= 2000
    assert height <= 3000
    found = texts(chart.draw(plan(*jobs), "svg", nodes))
    assert "gpu-31 (8)" in found
    assert sum(text.startswith("gpt2-") for text in found) == 200


def test_a_long_name_keeps_the_end_that_tells_it_from_others() -> None:
    jobs = [Assignment(f"a-very-long-name-{n}", "ddp", 1, "n", (0,), n, n + 1) for n in range(20)]
    found = texts(chart.draw(plan(*jobs), "svg"))
    shown = [text for text in found if "…" in text]
    assert len(set(shown)) == 20


def test_devices_apart_are_separate_bars_and_names_stand_once() -> None:
    found = texts(chart.draw(plan(Assignment("apart", "ddp", 3, "n", (0, 1, 3), 0, 5)), "svg"))
    assert found.count("apart") == 1
    assert chart._stretches([0, 1, 3]) == [(0, 2), (3, 1)]


def test_the_same_plan_gives_the_same_svg() -> None:
    job = Assignment("j", "ddp", 1, "n", (0,), 0, 5)
    assert chart.draw(plan(job), "svg") == chart.draw(plan(job), "svg")
