"""What measured strategies say of those that were not measured: bounds, and estimates in between.

Three laws of data-parallel scaling stand behind it. More devices never make a batch slower than they need
to. No technique on k devices is more than k times as fast as the best on one, unless that one gives speed
for memory. And returns diminish: a further doubling brings no more than the one before it (Amdahl, 1967; a
real machine's caches can break these laws by a little, which is why a strategy that would be chosen on these
grounds is measured first).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from saturn_airflow.model.estimates import Estimate, Key

# A strategy on fewer devices uses them at most so many times as well.
_MOST_WASTE = 4.0
# What a further doubling may bring more than the one before it did, as a power of two.
_SLACK = 0.05

Spares = Callable[[Estimate], bool]
"""Whether a strategy gives speed for memory."""


def optimistic(key: Key, measured: Collection[Estimate], spares_memory: Spares) -> Estimate | None:
    """The best that ``key`` could turn out to be; None where nothing that works says anything of it.

    :param measured: what is known of the same fingerprint on the same kind of device.
    :param spares_memory: whether a strategy gives speed for memory.
    """
    works = [e for e in measured if e.works]
    if not works:
        return None
    own = sorted((e for e in works if e.technique == key.technique), key=lambda e: e.devices)
    k = key.devices
    # The best use of a device that was seen could be made of each of more devices, by any technique.
    plain = [e for e in works if e.devices <= k and not spares_memory(e)]
    bound = min(_scaled(e, k, 1.0) / (1.0 if plain else _MOST_WASTE) for e in plain or works)
    below = [e for e in own if e.devices < k]
    above = [e for e in own if e.devices > k]
    if below:
        bound = max(bound, _scaled(below[-1], k, _gain(below)))
    if above:
        bound = max(bound, above[0].seconds_per_batch)
        if not below:
            bound = max(bound, _scaled(above[0], k, 1.0) / _MOST_WASTE)
    nearest = min(works, key=lambda e: (e.technique != key.technique, abs(math.log(e.devices / k))))
    return dataclasses.replace(
        nearest,
        technique=key.technique,
        devices=k,
        kind=key.kind,
        parameters={},
        launch_seconds=min(e.launch_seconds for e in works),
        setup_seconds=min(e.setup_seconds for e in works),
        evaluation_seconds=min(e.evaluation_seconds for e in works) * min(1.0, nearest.devices / k),
        ending_seconds=min(e.ending_seconds for e in works),
        besides_seconds=nearest.besides_seconds * nearest.devices / k,
        seconds_per_batch=bound,
        batches_per_epoch=max(e.batches_per_epoch for e in works),
        source="interpolated",
        batches=0,
        stale=None,
        verdicts={},
    )


def likely(estimate: Estimate, measured: Iterable[Estimate], loss: float = 0.15) -> Estimate:
    """A realistic estimate made of an :func:`optimistic` one: each doubling loses ``loss`` to communication.

    :param measured: what is known of the same fingerprint on the same kind of device; doublings count from
        the fewest devices among it.
    """
    fewest = min((e.devices for e in measured if e.works), default=1)
    doublings = max(0.0, math.log2(estimate.devices / fewest))
    return dataclasses.replace(
        estimate, seconds_per_batch=estimate.seconds_per_batch * (1 + loss) ** doublings
    )


def interpolated(measured: Sequence[Estimate], counts: Iterable[int]) -> list[Estimate]:
    """Estimates for numbers of devices between measured ones, of one job under one technique.

    Seconds lie on the straight line between their neighbours where both axes are logarithmic: with
    diminishing returns it can't be worse than that. ``uncertainty`` says how much better it could be.

    :param measured: of one fingerprint, technique and kind.
    """
    works = sorted((e for e in measured if e.works), key=lambda e: e.devices)
    broken = [e.devices for e in measured if not e.works]
    found = []
    for count in counts:
        low = [e for e in works if e.devices < count]
        high = [e for e in works if e.devices > count]
        if not low or not high or any(e.devices == count for e in works):
            continue
        a, b = low[-1], high[0]
        if any(a.devices < devices < b.devices for devices in broken):
            continue
        share = math.log(count / a.devices) / math.log(b.devices / a.devices)
        seconds = a.seconds_per_batch ** (1 - share) * b.seconds_per_batch**share
        least = max(_scaled(a, count, _gain(low)), b.seconds_per_batch)
        found.append(
            dataclasses.replace(
                a,
                devices=count,
                launch_seconds=max(a.launch_seconds, b.launch_seconds),
                setup_seconds=max(a.setup_seconds, b.setup_seconds),
                evaluation_seconds=max(a.evaluation_seconds, b.evaluation_seconds),
                ending_seconds=max(a.ending_seconds, b.ending_seconds),
                core_share=max(a.core_share, b.core_share),
                besides_seconds=a.besides_seconds * a.devices / count,
                seconds_per_batch=seconds,
                spread=max(a.spread, b.spread),
                uncertainty=max(0.0, 1 - least / seconds),
                peak_device_bytes=max(a.peak_device_bytes, b.peak_device_bytes),
                peak_host_bytes=max(a.peak_host_bytes, b.peak_host_bytes),
                batches=0,
                source="interpolated",
                stale=None,
                verdicts={},
            )
        )
    return found


def hopeless(key: Key, measured: Iterable[Estimate], own: Collection[str]) -> bool:
    """Whether what failed says that ``key`` fails too.

    What ran out of memory does so on fewer devices. Saturn's techniques that can't cut a model in k can't cut
    it in a multiple of k; why one's own refuses k devices nobody knows, so it says nothing of others.

    :param own: the techniques that are the user's.
    """
    for e in measured:
        if e.technique != key.technique or e.works or e.passing:
            continue
        if key.devices == e.devices:
            return True
        if e.out_of_memory:
            if key.devices < e.devices:
                return True
        elif key.devices % e.devices == 0 and e.technique not in own:
            return True
    return False


def _scaled(estimate: Estimate, devices: int, gain: float) -> float:
    """Its seconds per batch on ``devices``, if each doubling makes it 2 ** gain times as fast."""
    return estimate.seconds_per_batch * math.pow(estimate.devices / devices, gain)


def _gain(below: Sequence[Estimate]) -> float:
    """By which power of two a further doubling is faster at most, after what the last one brought.

    :param below: of one technique, by ascending number of devices.
    """
    if len(below) < 2:
        return 1.0
    before, last = below[-2:]
    brought = math.log(before.seconds_per_batch / last.seconds_per_batch) / math.log(
        last.devices / before.devices
    )
    return min(1.0, max(0.0, brought) + _SLACK)
