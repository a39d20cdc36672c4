"""Nodes' memory as they see it: written down, divided among those that share it, and planned with."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow import Cluster, HParams, Job, Node
from saturn_airflow.deciding.choices import why_nowhere
from saturn_airflow.launch import host_memory
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.node_memory import KEPT_FREE, NodeMemory, for_jobs
from saturn_airflow.operators import inventory, memory_records
from saturn_airflow.operators.first_plan import to_plan
from saturn_airflow.operators.wave_tasks import Learned
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import by_key, options_of

GIB = 2.0**30
DAY = 86400.0
JOB = Job("big", load_model="m:f", load_dataloader="d:f", hparams=HParams(batches=10))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    return tmp_path


def estimate(technique: str, devices: int, gib: float) -> Estimate:
    return Estimate(
        fingerprint=fingerprint(JOB),
        technique=technique,
        devices=devices,
        kind="gpu",
        seconds_per_batch=1.0,
        peak_host_bytes=int(gib * GIB),
    )


def seen(node: str, devices: int, seen: float = DAY, **limits: float) -> NodeMemory:
    return NodeMemory(node=node, devices=devices, seen=seen, limits=limits)


def test_a_node_says_what_memory_there_is_and_a_damaged_or_newer_note_is_none(home: Path) -> None:
    inventory.announce(Node("gpu-a", 2))
    assert memory_records.learned() == {"gpu-a": pytest.approx((1 - KEPT_FREE) * host_memory.total())}
    (home / "memory" / "torn.json").write_text("{")
    (home / "memory" / "newer.json").write_text(json.dumps({"format": 99}))
    assert list(memory_records.learned()) == ["gpu-a"]
    told = seen("gpu-a", 2, machine=3 * GIB)
    assert NodeMemory.from_dict({**told.to_dict(), "later": 1}) == told


def test_a_note_that_cant_be_written_fails_nobody(home: Path) -> None:
    (home / "memory").write_text("a file, where the folder should be")
    memory_records.record(Node("gpu-a", 2))
    assert memory_records.learned() == {}


def test_limits_are_told_apart_by_machine_and_group() -> None:
    limits = host_memory.limits()
    assert min(limits.values()) == host_memory.total()
    machine = min(limits, key=len)
    assert all(name == machine or name.startswith(f"{machine}/") for name in limits)


def test_nodes_that_share_memory_have_parts_of_it() -> None:
    free = 1 - KEPT_FREE
    two = [seen("a", 2, machine=80 * GIB), seen("b", 6, machine=80 * GIB)]
    assert for_jobs(two) == {"a": free * 20 * GIB, "b": free * 60 * GIB}
    own_groups = [seen("a", 2, machine=80 * GIB, x=10 * GIB), seen("b", 6, machine=80 * GIB, y=70 * GIB)]
    assert for_jobs(own_groups) == {"a": free * 10 * GIB, "b": free * 60 * GIB}
    gone = [seen("new", 2, seen=10 * DAY, machine=80 * GIB), seen("old", 6, machine=80 * GIB)]
    assert for_jobs(gone)["new"] == free * 80 * GIB
    assert for_jobs([seen("a", 1)]) == {}


@given(
    st.lists(
        st.tuples(
            st.integers(1, 8),
            st.floats(0, 6 * DAY),
            st.dictionaries(st.sampled_from("xyz"), st.just(0), min_size=1),
        ),
        max_size=6,
    ),
    st.fixed_dictionaries({limit: st.floats(1.0, 1e12) for limit in "xyz"}),
)
def test_no_limit_is_given_out_twice(
    nodes: list[tuple[int, float, dict[str, int]]], limits: dict[str, float]
) -> None:
    every = [
        seen(str(number), devices, at, **{name: limits[name] for name in under})
        for number, (devices, at, under) in enumerate(nodes)
    ]
    parts = for_jobs(every)
    assert parts.keys() == {one.node for one in every}
    for limit, most in limits.items():
        given_out = math.fsum(parts[one.node] for one in every if limit in one.limits)
        assert given_out <= (1 - KEPT_FREE) * most * (1 + 1e-9)


def techniques(cluster: Cluster, memory: dict[str, float], *estimates: Estimate) -> list[str]:
    return [option.technique for option in options_of(JOB, by_key(*estimates), cluster, memory)]


def test_plans_keep_to_what_was_seen_and_what_was_set_goes_before_it() -> None:
    known = estimate("spill", 1, 30), estimate("fsdp", 2, 30)
    node = Node("n", 2)
    assert techniques(Cluster(node), {}, *known) == ["spill", "fsdp"]
    assert techniques(Cluster(node), {"other": GIB}, *known) == ["spill", "fsdp"]
    assert techniques(Cluster(node), {"n": 60 * GIB}, *known) == ["spill", "fsdp"]
    assert techniques(Cluster(node), {"n": 59 * GIB}, *known) == ["fsdp"]
    assert techniques(Cluster(node, Node("m", 2)), {"n": 80 * GIB, "m": 59 * GIB}, *known) == ["fsdp"]
    assert techniques(Cluster(dataclasses.replace(node, host_memory=60)), {"n": GIB}, *known) == [
        "spill",
        "fsdp",
    ]
    assert techniques(Cluster(dataclasses.replace(node, host_memory=59)), {"n": 99 * GIB}, *known) == ["fsdp"]


def test_what_ranks_share_refuses_nothing_that_ran_on_a_node_of_its_kind() -> None:
    wide, narrow = estimate("ddp", 2, 70), estimate("single", 1, 70)
    alike = Cluster(Node("n", 2), Node("m", 2)), {"n": 60 * GIB, "m": 60 * GIB}
    assert techniques(*alike, wide) == ["ddp"]
    assert techniques(*alike, narrow) == []
    unlike = Cluster(Node("n", 2), Node("m", 2)), {"n": 60 * GIB, "m": 80 * GIB}
    assert techniques(*unlike, wide) == []


def test_a_job_beyond_its_part_is_not_lost_but_told_of_and_one_beyond_the_node_is_left_out() -> None:
    cluster, known = Cluster(Node("n", 2)), by_key(estimate("single", 1, 30))
    for gib, planned_there in ((59, True), (29, False)):
        knowledge = Knowledge((JOB,), cluster, {}, {}, known, memory={"n": gib * GIB})
        warned: list[str] = []
        planned, unplanned = to_plan(Learned(knowledge, [], {}, 0, 0.0), known, [], "auto", {}, warned.append)
        assert bool(planned) == planned_there
        assert bool(warned) == planned_there
        if planned:
            assert "big may be ended where others fill its node's memory" in warned[0]
            assert "its devices' part of node 'n' is 29.5 GiB" in warned[0]
        else:
            assert unplanned[0]["job"] == "big"
            assert (
                "single x 1: it took 30.0 GiB of host memory, and node 'n' has 29.0 GiB for all its jobs; "
                "keep the job to nodes with more (Job(nodes=...)), or say what its jobs may have with "
                "Node(host_memory=...)"
            ) in unplanned[0]["reason"]
    set_by_user = Cluster(Node("n", 2, host_memory=59))
    assert techniques(set_by_user, {}, *known.values()) == []
    assert "its devices' part of node 'n' is 29.5 GiB" in why_nowhere(
        JOB, list(known.values()), [], cluster=set_by_user
    )
