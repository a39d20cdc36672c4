"""What measured strategies say of the others."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.profiling.unmeasured import hopeless, interpolated, optimistic


def seen(devices: int, seconds: float = 1.0, technique: str = "even", **fields: object) -> Estimate:
    usual = {"seconds_per_batch": seconds, "setup_seconds": 1.0, "batches": 5, "batches_per_epoch": 10}
    return Estimate(
        fingerprint="f",
        technique=technique,
        devices=devices,
        kind="cpu",
        **{**usual, **fields},  # type: ignore[arg-type]
    )


def key(devices: int, technique: str = "even") -> Key:
    return Key("f", technique, devices, "cpu")


def never(estimate: Estimate) -> bool:
    return False


@st.composite
def curves(draw: st.DrawFn) -> list[float]:
    """Seconds on 1 to 16 devices under Amdahl's law."""
    one = draw(st.floats(0.01, 10))
    serial = draw(st.floats(0, 1))
    return [one * (serial + (1 - serial) / k) for k in range(1, 17)]


@given(curves(), st.sets(st.integers(1, 16), min_size=1), st.integers(1, 16))
def test_nothing_turns_out_better_than_the_best_it_could_be(
    curve: list[float], measured: set[int], devices: int
) -> None:
    known = [seen(k, curve[k - 1]) for k in sorted(measured - {devices})]
    hope = optimistic(key(devices), known, never)
    if not known:
        assert hope is None
        return
    assert hope is not None
    assert (hope.technique, hope.devices, hope.source) == ("even", devices, "interpolated")
    if devices > min(measured):
        assert hope.seconds_per_batch <= curve[devices - 1] * (1 + 1e-9)


@given(curves(), st.integers(1, 7), st.integers(2, 8))
def test_what_lies_between_is_no_worse_than_said_and_no_better_than_its_uncertainty(
    curve: list[float], low: int, steps: int
) -> None:
    high = low + steps
    counts = range(low + 1, high)
    found = interpolated([seen(low, curve[low - 1]), seen(high, curve[high - 1])], range(1, 17))
    assert [e.devices for e in found] == list(counts)
    for e in found:
        actual = curve[e.devices - 1]
        assert actual <= e.seconds_per_batch * (1 + 1e-9)
        assert actual >= e.seconds_per_batch * (1 - e.uncertainty) * (1 - 1e-9)
        assert e.source == "interpolated"
        assert e.batches == 0


def test_nothing_lies_between_what_is_not_known_to_work() -> None:
    assert interpolated([seen(1), seen(4, reason="out of memory")], range(1, 9)) == []
    assert interpolated([seen(1), seen(2, reason="refused"), seen(4, 0.3)], [2, 3]) == []


def test_another_technique_is_no_better_than_the_best_that_is_known_on_each_device() -> None:
    known = [seen(1, 1.0), seen(1, 3.0, "slow")]
    hope = optimistic(key(4, "wide"), known, never)
    assert hope is not None
    assert hope.seconds_per_batch == 0.25


def test_what_gives_speed_for_memory_bounds_nothing_else() -> None:
    def frugal(estimate: Estimate) -> bool:
        return estimate.technique == "frugal"

    hope = optimistic(key(2), [seen(1, 8.0, "frugal")], frugal)
    assert hope is not None
    assert hope.seconds_per_batch == 1.0


def test_returns_diminish() -> None:
    hope = optimistic(key(4), [seen(1, 1.0), seen(2, 0.8)], never)
    assert hope is not None
    assert 0.6 < hope.seconds_per_batch < 0.64


def test_what_failed_says_what_fails_too() -> None:
    memory = seen(2, reason="out of memory (CUDA)")
    for own in ((), ("even",)):
        assert hopeless(key(1), [memory], own)
        assert hopeless(key(2), [memory], own)
        assert not hopeless(key(4), [memory], own)
        assert not hopeless(key(1, "other"), [memory], own)
    heads = seen(3, reason="its 8 heads can't be cut in 3")
    assert hopeless(key(3), [heads], ["even"])
    assert not hopeless(key(6), [heads], ["even"])
    assert hopeless(key(6), [heads], [])
    assert not hopeless(key(4), [heads], [])
    assert not hopeless(key(6), [dataclasses.replace(heads, passing=True)], [])
    assert not hopeless(key(6), [seen(3)], [])
