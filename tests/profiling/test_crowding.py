"""What trials tell of how jobs get on beside each other, where devices share a machine's cores."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow.launch import cores
from saturn_airflow.model.cluster import Cluster, Node
from saturn_airflow.model.core_use import CoreUse, seconds_besides
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.profiling.crowding import crowded

SPAN = st.tuples(st.floats(0, 100), st.floats(0.1, 20))


def use(began: float, ended: float, rate: float, of_run: float = 0.0, **fields: Any) -> CoreUse:
    """A trial on a machine of which ``rate`` cores work all the time."""
    return dataclasses.replace(
        CoreUse(
            node="a",
            machine="m",
            cores=(0, 1),
            began=began,
            ended=ended,
            busy_before=rate * began,
            busy_after=rate * ended,
            of_run=of_run,
        ),
        **fields,
    )


def estimate(seconds_per_batch: float, devices: int = 1) -> Estimate:
    return Estimate(
        fingerprint="f", technique="single", devices=devices, kind="cpu", seconds_per_batch=seconds_per_batch
    )


@given(st.lists(SPAN, min_size=1, max_size=8), st.floats(0, 2), st.floats(0, 5))
def test_a_moment_counts_once_however_many_trials_run_in_it(
    spans: list[tuple[float, float]], rate: float, of_run: float
) -> None:
    uses = [use(began, began + seconds, rate, of_run) for began, seconds in spans]
    covered, end = 0.0, 0.0
    for began, seconds in sorted(spans):
        covered += max(0.0, began + seconds - max(began, end))
        end = max(end, began + seconds)
    expected = max(0.0, rate * covered / len(spans) - of_run)
    assert seconds_besides(uses) == pytest.approx(expected, abs=1e-6)


def test_jobs_whose_devices_share_cores_take_as_long_as_the_cores_need() -> None:
    cluster = Cluster(Node("a", devices=2, kind="cpu"), Node("b", devices=2, kind="cpu"))
    # Four slots of two nodes on the two cores of one machine; a second of them goes beside each trial.
    uses = [use(10.0 * i, 10.0 * i + 2, 1.0, 1.0, node=node, of_rank=1.0) for i, node in enumerate("ab")]
    found = crowded([(estimate(0.1), uses[0]), (estimate(0.1), uses[1])], cluster, jobs=8)
    assert [e.seconds(100) for e in found] == pytest.approx([2 * (10 + 1)] * 2)
    assert found[0].seconds_per_batch == pytest.approx(0.2), "what training is then seen to take"
    # One job has the machine to itself.
    (alone,) = crowded([(estimate(0.1), uses[0])], cluster, jobs=1)
    assert alone.seconds(100) == pytest.approx(10.0)


def test_jobs_that_leave_cores_idle_are_not_held_up() -> None:
    cluster = Cluster(Node("a", devices=8, kind="cpu"))
    # They sleep; what goes beside each of them needs less than they leave.
    asleep = use(0.0, 2.0, 0.5, of_rank=0.0)
    (found,) = crowded([(estimate(0.1), asleep)], cluster, jobs=20)
    assert found.besides_seconds == pytest.approx(4.0)
    assert found.seconds(100) == pytest.approx(10.0)
    assert found.seconds(10) == pytest.approx(4.0)


def test_where_nobody_looked_an_estimate_is_what_the_trial_said() -> None:
    cluster = Cluster(Node("a", devices=2, kind="cpu"))
    broken = dataclasses.replace(estimate(0.1), reason="out of memory")
    measured = [(estimate(0.1), None), (broken, use(0.0, 2.0, 2.0))]
    assert crowded(measured, cluster, jobs=8) == [e for e, _ in measured]


def test_what_training_said_needs_no_correction() -> None:
    trained = estimate(0.3)
    tried = dataclasses.replace(estimate(0.1), core_share=2.0, besides_seconds=1.0)
    assert trained.joined(tried).seconds(100) == pytest.approx(20.0)


def test_the_kernel_counts_what_this_process_works() -> None:
    before, own = cores.worked(), time.process_time()
    while time.process_time() < own + 0.15:
        pass
    after = cores.worked()
    assert before is not None
    assert after is not None
    assert set(after.cores) == os.sched_getaffinity(0)
    assert after.seconds - before.seconds >= 0.1
    assert after.at > before.at


def test_core_use_survives_json() -> None:
    told = use(0.0, 1.0, 0.5)
    assert CoreUse.from_dict({**told.to_dict(), "later": 1}) == told
