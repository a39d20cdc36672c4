"""What runs next, where and under which strategy: one decision for all sweeps together.

Devices are given away in two passes. First each sweep, in its turn, gets devices for each of its jobs: as
many as are thrifty when others wait behind it, more when few do. What runs stays, unless somebody before it
in the order needs its devices and it still has several times as long to go as a stop costs. Then the
devices that are left widen whoever gains most seconds per device, weighted towards sweeps that end soon
(:mod:`saturn_airflow.sharing.widening`).

A job that is first in turn and needs more devices than are idle would wait for ever behind jobs that need
fewer and can't be stopped. So it gets a reservation: the idle devices of the node where it is going to end
first are kept free for it, and only jobs that end before it can begin have them meanwhile. That is EASY
backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).

A decision depends on the state alone: whoever decides anew from the same state decides the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Way
from saturn_airflow.model.sharing import SharedCluster, SharingRules
from saturn_airflow.sharing.device_state import Devices, JobEntry
from saturn_airflow.sharing.ranking import kinds_of, needs_of, ranks, ways_on
from saturn_airflow.sharing.widening import widen

#: A device-second is worth this much for each sweep that waits behind, shared out among all devices: what a
#: wide job takes too much delays all of them, and those that are still to arrive.
_PRICE = 10.0
#: A job's seconds count for its sweep by this power of its share of the longest job's: who ends early anyway
#: need not be wide.
_CRITICAL = 4


@dataclass(frozen=True)
class Turn:
    """A job's place."""

    sweep: str
    job: str
    place: Place


@dataclass(frozen=True)
class Decision:
    """What is to be done now.

    :param starts: jobs to launch: all their devices are free.
    :param stops: running jobs that are to write their checkpoint and give way.
    :param next: jobs that are to start once devices are free which somebody is leaving.
    :param look_again: when to decide anew if nothing happens until then; None: not before something does.
    """

    starts: tuple[Turn, ...] = ()
    stops: tuple[Turn, ...] = ()
    next: tuple[Turn, ...] = ()
    look_again: float | None = None


def decide(cluster: SharedCluster, rules: SharingRules) -> Decision:
    """What runs next.

    Jobs that fit on no node that is up wait. Those that run on a node that is not up are taken to be lost:
    they wait, too, with what is left of them.
    """
    return _Deciding(cluster, rules).run()


class _Choice(NamedTuple):
    """A place for a job. Compared field by field.

    :param late: seconds after the deadline that presses; 0 where none does.
    :param cost: seconds, and device-seconds at their price.
    :param loss: device-seconds that stopping ``victims`` costs.
    :param spare: devices of the node that stay idle.
    """

    late: float
    cost: float
    loss: float
    spare: int
    node: str
    way: Way
    victims: tuple[JobEntry, ...]


class _Room(NamedTuple):
    """What may be had of a node.

    :param held: devices of ``behind``.
    :param behind: running jobs that may be stopped, the last in turn first.
    """

    idle: int
    held: int
    behind: list[JobEntry]

    def victims(self, devices: int) -> tuple[JobEntry, ...]:
        """Who is to give way for so many devices."""
        chosen: list[JobEntry] = []
        wanted = devices - self.idle
        for other in self.behind:
            if wanted <= 0:
                break
            assert other.job.place is not None
            chosen.append(other)
            wanted -= other.job.place.devices
        return tuple(chosen)


class _Reservation(NamedTuple):
    """Devices that are kept free for a job which will have enough of them then.

    :param until: when that is, in seconds of the cluster's clock.
    """

    node: str
    until: float
    devices: list[int]


class _Deciding:
    """The state of one decision. Seconds and moments are those of the cluster's clock."""

    def __init__(self, cluster: SharedCluster, rules: SharingRules) -> None:
        self.nodes = {node.name: node for node in cluster.nodes}
        self.cluster, self.rules = cluster, rules
        found = ranks(cluster, rules)
        ranked = [(found[sweep.name], sweep) for sweep in cluster.sweeps]
        ranked.sort(key=lambda pair: pair[0].key)
        self.sweeps = [[JobEntry(sweep, job, rank) for job in sweep.jobs] for rank, sweep in ranked]
        self.entries = [entry for entries in self.sweeps for entry in entries]
        self.devices = Devices.of(cluster, self.entries)
        self.of_kinds = kinds_of(cluster.nodes)
        self.rooms: dict[str, _Room] = {}
        self.reservations: list[_Reservation] = []
        for entry in self.entries:
            entry.ready = cluster.now if entry.job.leaving is None else entry.job.leaving
            if self.devices.runs(entry):
                assert entry.job.place is not None
                entry.way = _way_of(entry, cluster.kinds[entry.job.place.node])

    def run(self) -> Decision:
        """Two passes: each sweep in its turn, then the devices that are left."""
        for number, entries in enumerate(self.sweeps, 1):
            waiting = [entry for entry in entries if not self._keeps(entry)]
            sizes = {id(entry): self._thrifty_seconds(entry) for entry in waiting}
            longest = max(sizes.values(), default=0.0)
            # The longest jobs first. The more sweeps wait behind, the dearer a device-second.
            price = _PRICE * (len(self.sweeps) - number) / max(1, self.cluster.devices)
            for entry in sorted(waiting, key=lambda entry: (-sizes[id(entry)], entry.job.name)):
                critical = (sizes[id(entry)] / longest) ** _CRITICAL if longest else 1.0
                self._place(entry, max(1.0 / len(entries), critical), price)
        widen(self.cluster, self.rules, self.devices, self.sweeps)
        self._backfill()
        return self._decision()

    def _keeps(self, entry: JobEntry) -> bool:
        """Whether ``entry`` goes on where it runs."""
        if not self.devices.keep(entry):
            return False
        assert entry.target is not None
        self.rooms.pop(entry.target.node, None)
        return True

    def _thrifty_seconds(self, entry: JobEntry) -> float:
        """What a job takes under the strategy of least area."""
        nodes = self.cluster.nodes if entry.job.job.nodes is not None else self.of_kinds
        return needs_of(entry.job, nodes).thrifty

    def _place(self, entry: JobEntry, critical: float, price: float) -> None:
        """Give ``entry`` the best place there is, stopping who gives way for it; or reserve devices for it.

        :param critical: what its seconds count for, from 0 to 1: 1 for the longest job of its sweep.
        :param price: what a device-second counts for.
        """
        best: _Choice | None = None
        due = math.inf
        if entry.rank.pressing < 1 and entry.sweep.deadline is not None:
            due = entry.sweep.deadline
        for node in self.cluster.nodes:
            room = self._room(node.name)
            most = room.idle + room.held
            for way in ways_on(entry.job.job, node) if most else ():
                if way.devices > most:
                    break
                seconds = way.seconds(entry.job.left)
                late = max(0.0, self.cluster.now + seconds - due)
                cost = seconds * (critical + price * way.devices)
                # Whom to stop is worked out only where it could decide.
                if best is not None and (late, cost) > best[:2]:
                    continue
                victims = room.victims(way.devices)
                loss = sum(self._cost_of_stop(victim) for victim in victims)
                found = _Choice(late, cost, loss, max(0, room.idle - way.devices), node.name, way, victims)
                # Up to the node's name, so that whoever decides chooses alike; victims have no order.
                if best is None or found[:5] < best[:5]:
                    best = found
        if best is None:
            if self._may_reserve() or entry.rank.may_not_wait:
                self._reserve(entry)
            return
        for victim in best.victims:
            self.devices.stop(victim, self.cluster.now + self.rules.seconds_to_leave(victim.job))
        self.devices.claim(entry, best.node, best.way)
        self.rooms.pop(best.node)

    def _room(self, node: str) -> _Room:
        """What may be had of ``node``: all that runs there and is not decided yet is later in turn."""
        if node not in self.rooms:
            behind = [other for other in self.devices.held(node) if self._gives_way(other)]
            behind.sort(key=lambda other: other.rank.key, reverse=True)
            held = sum(other.job.place.devices for other in behind if other.job.place is not None)
            self.rooms[node] = _Room(len(self.devices.idle(node)), held, behind)
        return self.rooms[node]

    def _gives_way(self, other: JobEntry) -> bool:
        """Whether a job may be stopped, and still has several times as long to go as that costs."""
        cost = self._seconds_of_stop(other)
        return other.may_stop(self.cluster.now, self.rules) and other.seconds_here() > self.rules.win * cost

    def _cost_of_stop(self, victim: JobEntry) -> float:
        """Device-seconds."""
        assert victim.way is not None
        return victim.way.devices * self._seconds_of_stop(victim)

    def _seconds_of_stop(self, victim: JobEntry) -> float:
        assert victim.way is not None
        return self.rules.seconds_to_leave(victim.job) + victim.way.setup

    def _may_reserve(self) -> bool:
        """Whether a job without a place is the first, for which devices are kept free.

        Where all others may be stopped, its turn comes without that.
        """
        return not self.reservations and not all(sweep.preempt for sweep in self.cluster.sweeps)

    def _reserve(self, entry: JobEntry) -> None:
        """Keep idle devices free of the node where ``entry`` is going to end first."""
        best: tuple[float, float, str, int] | None = None
        for node in self.cluster.nodes:
            free = sorted(self.devices.expected_free(node.name))
            for way in ways_on(entry.job.job, node):
                start = free[way.devices - 1]
                end = start + way.seconds(entry.job.left)
                if end < math.inf and (best is None or (end, start, node.name, way.devices) < best):
                    best = (end, start, node.name, way.devices)
        if best is not None:
            _, start, node_name, devices = best
            self.reservations.append(
                _Reservation(node_name, start, self.devices.keep_free(node_name, devices))
            )
            self.rooms.pop(node_name, None)

    def _backfill(self) -> None:
        """Give reserved devices to jobs that end before they are needed."""
        for reserved in self.reservations:
            left = reserved.until - self.cluster.now
            self.devices.let_go(reserved.node, reserved.devices)
            for entry in self.entries:
                if not self.devices.idle(reserved.node):
                    break  # as for most, where many wait whose deadline presses
                if entry.target is not None or self.devices.runs(entry):
                    continue
                ways = ways_on(entry.job.job, self.nodes[reserved.node])
                soon = [way for way in ways if way.seconds(entry.job.left) <= left]
                if soon and soon[0].devices <= len(self.devices.idle(reserved.node)):
                    self.devices.claim(entry, reserved.node, soon[0])
            self.devices.keep_free(reserved.node, len(reserved.devices))

    def _decision(self) -> Decision:
        starts, stops, following = [], [], []
        waits: list[float] = []
        for entry in self.entries:
            if entry.stays:
                continue
            # Never this moment, which would be decided again and again.
            waits.append(max(entry.rank.changes, self.cluster.now + 1.0))
            if self.devices.runs(entry):
                assert entry.job.place is not None
                stops.append(Turn(*entry.key, entry.job.place))
            if entry.target is None:
                continue
            turn = Turn(*entry.key, entry.target)
            if entry.ready <= self.cluster.now and self.devices.free_now(entry.target):
                starts.append(turn)
            else:
                following.append(turn)
        again = min(self.cluster.now + self.rules.look_every, *waits) if waits else None
        return Decision(tuple(starts), tuple(stops), tuple(following), again)


def _way_of(entry: JobEntry, kind: str) -> Way:
    option = entry.job.option
    return Way(option.devices, option.seconds[kind] - option.setup, option.setup, option)
