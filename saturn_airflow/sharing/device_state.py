"""The devices while it is decided what runs on them next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Way
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.sharing.ranking import Rank


@dataclass(eq=False)
class JobEntry:
    """A job while it is decided where it runs.

    :param rank: of its sweep.
    :param target: where it is to run; None while it is to wait.
    :param way: the strategy under which it runs, or is to run.
    :param ready: from when on it can be launched: once its checkpoint is written.
    """

    sweep: SharedSweep
    job: SharedJob
    rank: Rank
    target: Place | None = None
    way: Way | None = None
    ready: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """The names of sweep and job."""
        return self.sweep.name, self.job.name

    @property
    def stays(self) -> bool:
        """Whether it is to go on as it runs."""
        return self.target is not None and self.target is self.job.place

    def seconds_here(self) -> float:
        """What it still takes where it runs."""
        assert self.way is not None
        return self.job.setting_up + self.job.left * self.way.net

    def seconds(self) -> float:
        """What it still takes as it is decided."""
        assert self.way is not None
        return self.seconds_here() if self.stays else self.way.seconds(self.job.left)

    def may_stop(self, now: float, rules: SharingRules) -> bool:
        """Whether it may be told to give way: not again within a set time."""
        return self.sweep.preempt and not rules.was_just_stopped(self.job, now)


@dataclass
class Devices:
    """Who has which devices. All by node.

    :param free_at: when each device is free of what is on it and does not stay.
    :param holder: the job that runs on each device and has not been decided yet.
    :param claimed: whether it is decided who has each device: a job that stays or starts, what is no job of a
        sweep, or nobody, where it is kept free.
    :param taker: the job that each device is claimed for, where it is for one.
    """

    now: float
    free_at: dict[str, list[float]] = field(default_factory=dict)
    holder: dict[str, list[JobEntry | None]] = field(default_factory=dict)
    claimed: dict[str, list[bool]] = field(default_factory=dict)
    taker: dict[str, list[JobEntry | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: SharedCluster, entries: Iterable[JobEntry]) -> Devices:
        """The devices of ``cluster``, with what runs on them."""
        found = cls(cluster.now)
        for node in cluster.nodes:
            until = [cluster.busy.get((node.name, d), cluster.now) for d in range(node.devices)]
            found.free_at[node.name] = [max(cluster.now, at) for at in until]
            found.holder[node.name] = [None] * node.devices
            found.taker[node.name] = [None] * node.devices
            found.claimed[node.name] = [at > cluster.now for at in until]
        for entry in entries:
            place = entry.job.place
            for device in place.device_ids if place is not None and place.node in found.holder else ():
                assert place is not None
                if entry.job.leaving is None:
                    assert found.holder[place.node][device] is None, "a device runs two jobs"
                    found.holder[place.node][device] = entry
                else:  # it has to be waited for, and nothing is left to decide about it
                    free = found.free_at[place.node]
                    free[device] = max(free[device], entry.job.leaving)
        return found

    def runs(self, entry: JobEntry) -> bool:
        """Whether ``entry`` runs on a node that is up, and was not told to leave before."""
        place = entry.job.place
        return place is not None and place.node in self.holder and entry.job.leaving is None

    def idle(self, node: str) -> list[int]:
        """Devices of ``node`` that nobody has or is going to have, in the order in which they become free."""
        free, holder = self.free_at[node], self.holder[node]
        ids = [d for d, claimed in enumerate(self.claimed[node]) if not claimed and holder[d] is None]
        ids.sort(key=free.__getitem__)
        return ids

    def held(self, node: str) -> Iterator[JobEntry]:
        """The jobs that run on ``node`` and have not been decided yet."""
        yield from {id(entry): entry for entry in self.holder[node] if entry is not None}.values()

    def keep(self, entry: JobEntry) -> bool:
        """Let ``entry`` go on where it runs, if it does and nobody before it took its devices."""
        place = entry.job.place
        # All devices of a job are taken from it at once, so the first tells of all.
        if place is None or not self.runs(entry) or self.holder[place.node][place.device_ids[0]] is not entry:
            return False
        for device in place.device_ids:
            self.holder[place.node][device] = None
            self.claimed[place.node][device] = True
            self.taker[place.node][device] = entry
        entry.target = place
        return True

    def stop(self, entry: JobEntry, at: float) -> None:
        """What ``entry`` runs on is free for others from ``at`` on, and so is it to run elsewhere."""
        assert entry.job.place is not None
        node = entry.job.place.node
        for device in entry.job.place.device_ids:
            self.holder[node][device], self.claimed[node][device] = None, False
            self.taker[node][device] = None
            self.free_at[node][device] = at
        entry.ready, entry.target = at, None

    def claim(self, entry: JobEntry, node: str, way: Way) -> None:
        """``entry`` is to run there, on the devices that are free first."""
        ids = self.idle(node)[: way.devices]
        assert len(ids) == way.devices, "more devices than there are"
        for device in ids:
            self.claimed[node][device], self.taker[node][device] = True, entry
        entry.target = Place(way.option.technique, way.devices, node, tuple(sorted(ids)))
        entry.way = way

    def give_back(self, entry: JobEntry) -> None:
        """``entry``, which waits, is not to run where it was going to."""
        assert entry.target is not None
        for device in entry.target.device_ids:
            self.claimed[entry.target.node][device] = False
            self.taker[entry.target.node][device] = None
        entry.target = None

    def keep_free(self, node: str, devices: int) -> list[int]:
        """Keep idle devices of ``node`` from all, so many at the most; which they are."""
        kept = self.idle(node)[:devices]
        for device in kept:
            self.claimed[node][device] = True
        return kept

    def let_go(self, node: str, devices: Iterable[int]) -> None:
        """Let others have devices of ``node`` that were kept free."""
        for device in devices:
            self.claimed[node][device] = False

    def expected_free(self, node: str) -> list[float]:
        """When each device of ``node`` is expected to be free; infinite for those that are kept free."""
        return [self._expected_free(node, device) for device in range(len(self.holder[node]))]

    def _expected_free(self, node: str, device: int) -> float:
        free = self.free_at[node][device]
        if (holder := self.holder[node][device]) is not None:
            return self.now + holder.seconds_here()
        if (taker := self.taker[node][device]) is not None:
            return max(free, taker.ready) + taker.seconds()
        # Claimed by no job: busy until then or, where it is free already, kept for somebody.
        return math.inf if self.claimed[node][device] and free <= self.now else free

    def free_now(self, place: Place) -> bool:
        """Whether all of these devices are free."""
        return all(self.free_at[place.node][d] <= self.now for d in place.device_ids)
