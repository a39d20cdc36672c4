"""Small problems, exactly: every way to share the jobs out over the nodes that area allows.

A *sharing* gives each node a set of jobs: by class, how many. For a makespan C, nodes are filled one after
another with sets of jobs. The least areas of all jobs leave W device-seconds to waste in all; a node that
takes so little that the rest would need more than the other nodes have is never tried, and near the optimum
few sets remain. Of those, :mod:`device_patterns` refutes most: the set for the node's own devices, or the
jobs that are left for those of all later nodes together, whichever is fuller first. What remains is packed,
or refuted, by :mod:`node_packing`: all with a little effort first, then those not settled with more. Equal
nodes take their sets in descending order, so that no sharing is tried twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.compiled import compiled
from saturn_airflow.planning.exact_search.node_packing import ClassRow, NotSettledError, Packer, Sharer
from saturn_airflow.planning.instances.arrays import Floats, Ints, merged
from saturn_airflow.planning.instances.instance import Instance
from saturn_airflow.planning.instances.schedule import Placed, Schedule

Counts = tuple[int, ...]
"""A set of jobs: by class, how many."""

#: A problem is small with at most so many nodes, and so many sets of jobs to choose one from.
_MOST_NODES = 4
_MOST_SHARINGS = 1 << 24
#: Sets of jobs that are kept for one node, 2 MiB for each class: more, and the attempt is given up.
_MOST_SETS = 1 << 18
#: Branches for a set when it first comes up, and by how much more each time that all others were tried, too.
_FIRST_EFFORT = 2000
_MORE_EFFORT = 8
#: Sets that are asked about between two looks at the clock.
_SETS_AT_ONCE = 32
_ROUNDING = 1e-11


def is_small(instance: Instance) -> bool:
    """Whether the instance is small enough for this search to be worth its time."""
    sharings = math.prod(len(group.jobs) + 1 for group in instance.classes)
    return len(instance.problem.nodes) <= _MOST_NODES and sharings <= _MOST_SHARINGS


def schedule_by(instance: Instance, end: float, clock: Clock) -> Schedule | None:
    """A schedule that ends by ``end``, or None when there is none.

    :raises NotSettledError: when the time is up.
    """
    return Attempt(instance, end).run(clock)


class Attempt:
    """The search for a schedule that ends by ``end``, a slice of time at a time.

    ``known`` has, by type of node and set, the row it was packed into, or None where that was refuted;
    ``hopeless`` the states of :meth:`_sharings` from which nothing came; ``unsettled`` the sharings that wait
    for more effort. ``too_many`` is true once there were more sets than are kept: then nothing is proven any
    more.
    """

    def __init__(self, instance: Instance, end: float) -> None:
        self.instance = instance
        # Nodes in order of type, so that equal nodes follow each other.
        self.nodes = sorted(range(len(instance.type_of)), key=lambda node: instance.type_of[node])
        self.kinds = [instance.type_of[node] for node in self.nodes]
        self.known: dict[tuple[int, Counts], ClassRow | None] = {}
        self.hopeless: set[tuple[int, Counts, Counts | None]] = set()
        self._aim(end)
        everything = tuple(len(group.jobs) for group in self.instance.classes)
        self.effort = _FIRST_EFFORT
        self.too_many = False
        self.waiting: Iterator[list[Counts] | None] = self._sharings(0, everything, None)
        self.unsettled: list[list[Counts]] = []

    def _aim(self, end: float) -> None:
        self.end = end
        self.packers = [Packer(self.instance, kind, end) for kind in range(len(self.instance.types))]
        #: The nodes from the n-th on, as if their devices were of one node.
        self.later = [
            Sharer(
                np.sort(np.concatenate([self.packers[kind].free for kind in self.kinds[at:]])),
                merged([self.packers[kind].modes for kind in sorted(set(self.kinds[at:]))]),
                end,
            )
            for at in range(len(self.nodes))
        ]

    def lower(self, end: float) -> None:
        """Go on for an earlier ``end``: what was refuted for the later one stays refuted."""
        assert end < self.end
        # The sharings that wait go on with the new packers; those passed over were refuted for the later end.
        self._aim(end)
        self.known = {key: None for key, row in self.known.items() if row is None}

    def run(self, clock: Clock) -> Schedule | None:
        """A schedule that ends in time, or None when there is none.

        :raises NotSettledError: when the time is up, call again to go on; or when there are too many sets.
        """
        while not self.too_many:
            for sharing in self.waiting:
                if sharing is not None:
                    try:
                        rows = self._rows(sharing, clock)
                    except NotSettledError:
                        self.unsettled.append(sharing)
                    else:
                        if rows is not None:
                            # Should a schedule that ends earlier still be asked for (``lower``), this sharing
                            # is tried first.
                            self.waiting = itertools.chain([sharing], self.waiting)
                            return self._schedule(rows)
                if clock.expired:
                    raise NotSettledError
            if self.too_many:
                break
            if not self.unsettled:
                return None
            self.waiting, self.unsettled = iter(self.unsettled), []
            self.effort *= _MORE_EFFORT
        raise NotSettledError

    def _rows(self, sharing: list[Counts], clock: Clock) -> list[ClassRow] | None:
        """Rows for the sets of all nodes, or None when one of them can't be packed."""
        # The fullest first: it is the most likely to be refuted, which spares the others.
        order = sorted(range(len(sharing)), key=lambda at: self._slack(at, sharing[at]))
        rows: dict[int, ClassRow] = {}
        unsettled = False
        for at in order:
            key = (self.kinds[at], sharing[at])
            if key not in self.known:
                jobs = tuple([k for k, n in enumerate(sharing[at]) for _ in range(n)])
                try:
                    self.known[key] = self.packers[self.kinds[at]].search(jobs, self.effort, clock)
                except NotSettledError:
                    # Another node's refutation may be easy.
                    unsettled = True
                    continue
            row = self.known[key]
            if row is None:
                return None
            rows[at] = row
        if unsettled:
            raise NotSettledError
        return [rows[at] for at in range(len(sharing))]

    def _slack(self, at: int, taken: Counts) -> float:
        """Device-seconds that the set leaves of the ``at``-th node's at most."""
        packer = self.packers[self.kinds[at]]
        return packer.capacity - math.fsum([n * packer.area[k] for k, n in enumerate(taken) if n])

    def _schedule(self, rows: list[ClassRow]) -> Schedule:
        """The rows, with classes turned back into jobs."""
        waiting = [list(group.jobs) for group in self.instance.classes]
        schedule: Schedule = [[] for _ in self.nodes]
        for node, row in zip(self.nodes, rows, strict=True):
            schedule[node] = [Placed(waiting[k].pop(), mode) for k, mode in row]
        return schedule

    def _sharings(self, at: int, left: Counts, before: Counts | None) -> Iterator[list[Counts] | None]:
        """Sets for the nodes from the ``at``-th on for the jobs ``left``.

        Yields None now and again, so that the caller can look at its clock.

        :param before: what the equal node before this one took; None when there is none.
        """
        kind = self.kinds[at]
        if at == len(self.nodes) - 1:
            if self.packers[kind].shareable(np.array([left]))[0]:
                yield [left]
            return
        state = (at, left, before)
        if state in self.hopeless:
            return
        hopeless = True
        equal = self.kinds[at + 1] == kind
        sets = self._sets(at, left, before)
        for first in range(0, len(sets), _SETS_AT_ONCE):
            yield None
            some = sets[first : first + _SETS_AT_ONCE]
            rests = np.array(left) - some
            if equal and at == len(self.nodes) - 2:
                # Of two equal nodes the first takes the larger set, in lexical order: argmax finds the first
                # class that differs (any, and a gain of 0, where none does).
                gain = some - rests
                larger = gain[np.arange(len(gain)), np.argmax(gain != 0, axis=1)] >= 0
                some, rests = some[larger], rests[larger]
            could = _both_could(self.packers[kind], self.later[at + 1], some, rests)
            for taken, rest in zip(some[could].tolist(), rests[could].tolist(), strict=True):
                own = tuple(taken)
                if at == len(self.nodes) - 2:
                    hopeless = False
                    yield [own, tuple(rest)]
                    continue
                for more in self._sharings(at + 1, tuple(rest), own if equal else None):
                    # Refuted meanwhile: the caller has tried to pack it with what came of it so far.
                    if self.known.get((kind, own), ()) is None:
                        break
                    if more is None:
                        yield None
                    else:
                        hopeless = False
                        yield [own, *more]
        if hopeless:
            self.hopeless.add(state)

    def _sets(self, at: int, left: Counts, before: Counts | None) -> Ints:
        """(sets, classes) sets for the ``at``-th node that leave the later ones no more than they hold.

        The fullest come first. Sets ``too_many`` where there are more than are kept.
        """
        packer = self.packers[self.kinds[at]]
        found = np.zeros((_MOST_SETS, len(left)), dtype=np.int64)
        count = _choose(
            packer.areas,
            self.later[at + 1].areas,
            packer.capacity * (1 + _ROUNDING),
            self.later[at + 1].capacity * (1 + _ROUNDING),
            np.array(left),
            np.array(left if before is None else before),
            before is not None,
            found,
        )
        if count < 0:
            self.too_many = True
            return found[:0]
        found = found[:count]
        return found[np.argsort(packer.allowances(found), kind="stable")]


def _both_could(one: Sharer, other: Sharer, sets: Ints, rests: Ints) -> npt.NDArray[np.bool_]:
    """(sets,) whether the one might share the set, and the other the rest; the fuller is asked first."""
    fuller = one.allowances(sets) <= other.allowances(rests)
    could = np.ones(len(sets), dtype=bool)
    for first in (True, False):
        for sharer, own, asked in ((one, sets, fuller == first), (other, rests, fuller != first)):
            which = could & asked
            could[which] = sharer.shareable(own[which])
    return could


@compiled
def _choose(
    area: Floats,
    later: Floats,
    room: float,
    later_room: float,
    left: Ints,
    before: Ints,
    descending: bool,
    found: Ints,
) -> int:
    """Every set of jobs ``left`` whose area has room on the node, and that of the rest on the later ones.

    Depth-first over the classes, as an odometer: ``taken[k]`` counts down from all there are of class k.

    :param area: (classes,) least device-seconds of a job on the node; ``later``: on the later ones.
    :param room: device-seconds of the node; ``later_room``: of the later ones.
    :param before: where ``descending``, no set is larger than this one in lexical order.
    :param found: (most, classes) is filled with the sets.
    :returns: how many there are; -1 for more than ``most``.
    """
    classes, most = len(left), len(found)
    taken = np.zeros(classes + 1, np.int64)
    used, given = np.zeros(classes + 1), np.zeros(classes + 1)
    # Whether all classes up to k equal those of ``before``: only then does it limit the next.
    tied = np.zeros(classes + 1, np.bool_)
    tied[0] = descending
    count, k, entering = 0, 0, True
    while k >= 0:
        if k == classes:
            if count == most:
                return -1
            for other in range(classes):
                found[count, other] = taken[other]
            count += 1
            k, entering = k - 1, False
            continue
        if entering:
            taken[k] = (min(left[k], before[k]) if tied[k] else left[k]) + 1
        entering = False
        taken[k] -= 1
        if taken[k] < 0:
            k -= 1
            continue
        rest = left[k] - taken[k]
        here = used[k] + (taken[k] * area[k] if taken[k] else 0.0)
        there = given[k] + (rest * later[k] if rest else 0.0)
        if here <= room and there <= later_room:
            used[k + 1], given[k + 1] = here, there
            tied[k + 1] = tied[k] and taken[k] == before[k]
            k, entering = k + 1, True
    return count
