"""An event simulation of a shared cluster: sweeps arrive, jobs run and end; at each event it is decided anew.

The same loop predicts when what is active ends, and replays sweeps that arrive over days. Only training is
made up: decisions are those of :func:`saturn_airflow.sharing.turns.decide`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.learning import SeenSpeed, corrected_jobs
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.sharing.pace import SEEN_SECONDS, SEEN_SHARE
from saturn_airflow.sharing.turns import Decision, decide
from saturn_airflow.sharing.use import decayed, with_held

#: A share of a job, and seconds, that count as none.
_NOTHING = 1e-9
_SOON = 1e-6
#: Events of one moment, at the most: with more, time stands still by a mistake of Saturn's.
_MOST_AT_ONCE = 20_000
#: Seconds between checkpoints: what a lost node costs at the most.
_CHECKPOINT_SECONDS = 600.0

Key = tuple[str, str]
Decide = Callable[[SharedCluster, SharingRules], Decision]


@dataclass(frozen=True)
class StayOnDevices:
    """A job on its devices without a break, from its launch until they are free again.

    :param start: seconds of the cluster's clock, as ``end``.
    :param trained: the share of its batches that was trained.
    """

    sweep: str
    job: str
    place: Place
    start: float
    end: float
    trained: float


@dataclass(frozen=True)
class NodeChange:
    """A node that goes, or comes.

    :param at: seconds of the cluster's clock.
    :param node: its name where it goes; the node itself where it comes.
    """

    at: float
    node: Node | str


@dataclass(frozen=True)
class Replay:
    """What happened.

    :param done: by sweep, when its last job was done.
    :param ran: in order of end.
    :param stops: how often a running job was told to give way.
    :param decisions: how often it was decided.
    :param left: what was not done when nothing could go on.
    """

    done: Mapping[str, float]
    ran: tuple[StayOnDevices, ...]
    stops: int
    decisions: int
    left: SharedCluster


class _JobState:
    """A job that is not done: what is known of it, and what is true.

    :ivar shared: the job as those see it who decide.
    :ivar actual: with the seconds that it really takes.
    :ivar known: (technique, devices) whose speed was seen.
    :ivar at: the moment up to which it was advanced.
    :ivar began: when it was launched where it runs, ``trains_at`` when it is set up there.
    :ivar left: the share of its batches that was left at its launch, ``rest`` at the moment ``at``.
    :ivar net: seconds that all of its batches take where it runs, without the set-up.
    :ivar speed_known_at: when its speed there will have been seen; infinite where it was.
    """

    __slots__ = (
        "actual",
        "at",
        "began",
        "known",
        "left",
        "net",
        "rest",
        "shared",
        "speed_known_at",
        "trains_at",
    )

    def __init__(self, shared: SharedJob, actual: PlannedJob, now: float) -> None:
        self.shared, self.actual = shared, actual
        self.known: set[tuple[str, int]] = set()
        self.at = self.trains_at = self.began = now
        self.left = self.rest = shared.left
        self.net = self.speed_known_at = math.inf

    def launch(
        self, place: Place, kind: str, now: float, slow: float = 1.0, setting_up: float | None = None
    ) -> None:
        """It begins to run in ``place``, where all takes ``slow`` times as long.

        :param setting_up: seconds until it trains; those of its strategy, if not given.
        """
        wanted = place.technique, place.devices
        option = next(o for o in self.actual.options if (o.technique, o.devices) == wanted)
        setup = slow * option.setup if setting_up is None else setting_up
        self.net = slow * (option.seconds[kind] - option.setup)
        self.at, self.trains_at = now, now + setup
        self.began, self.left = now, self.rest
        self.speed_known_at = math.inf
        if wanted not in self.known:
            self.speed_known_at = self.trains_at + max(SEEN_SECONDS, SEEN_SHARE * self.net)
        self.shared = dataclasses.replace(self.shared, place=place, since=now, setting_up=setup, leaving=None)

    def advance(self, now: float) -> None:
        """Train until ``now``."""
        # While it writes its checkpoint it trains nothing.
        if self.shared.leaving is None:
            self.rest = max(0.0, self.rest - max(0.0, now - max(self.at, self.trains_at)) / self.net)
        self.at = now

    def view(self) -> SharedJob:
        """What is known of it at this moment."""
        if self.shared.place is not None:
            setting_up = max(0.0, self.trains_at - self.at)
            self.shared = dataclasses.replace(self.shared, left=self.rest, setting_up=setting_up)
        return self.shared

    def leave(self, now: float, seconds: float) -> None:
        """It writes its checkpoint, and is gone after so many seconds."""
        self.shared = dataclasses.replace(self.shared, leaving=now + seconds, stopped=now)

    @property
    def next_event(self) -> float:
        """When something is going to happen to it."""
        if self.shared.leaving is not None:
            return self.shared.leaving
        return min(max(self.at, self.trains_at) + self.rest * self.net, self.speed_known_at)

    @property
    def done(self) -> bool:
        """Whether it has trained all, as far as its clock can tell: moments of the epoch are told apart by
        a quarter of a microsecond."""
        return self.rest * self.net <= _SOON and self.at >= self.trains_at


@dataclass(frozen=True)
class Arrival:
    """A sweep that arrives.

    :param sweep: with the seconds that are expected.
    :param actual: its jobs with those that they really take; as expected, if not given.
    """

    sweep: SharedSweep
    actual: tuple[PlannedJob, ...] | None = None

    @property
    def at(self) -> float:
        """When its jobs ask for devices."""
        return max(self.sweep.arrived, self.sweep.asks)


def replay(
    arrivals: Sequence[Arrival],
    nodes: tuple[Node, ...],
    rules: SharingRules,
    *,
    begin: SharedCluster | None = None,
    actual: Mapping[Key, PlannedJob] | None = None,
    slow: Mapping[str, float] | None = None,
    sure: Collection[Key] = (),
    changes: Sequence[NodeChange] = (),
    learn: bool = True,
    by: Decide = decide,
) -> Replay:
    """Simulate what is there, and what arrives, to the end.

    :param nodes: that are up at the beginning.
    :param begin: what is there at the beginning.
    :param actual: what jobs of ``begin`` really take, where that is not as expected.
    :param slow: by node, how many times as long all takes there.
    :param sure: running jobs whose expected seconds have that in them already.
    :param changes: nodes that go and come on the way.
    :param learn: whether speeds that are seen correct what is expected of a job.
    :param by: how it is decided what runs next.
    """
    return _Replay(
        sorted(arrivals, key=_in_time),
        nodes,
        rules,
        sorted(changes, key=lambda c: c.at),
        learn,
        by,
        slow or {},
    ).run(begin, actual or {}, sure)


class _Replay:
    """The state of a simulation. ``arrivals`` and ``changes`` are stacks: the next is the last."""

    def __init__(
        self,
        arrivals: list[Arrival],
        nodes: tuple[Node, ...],
        rules: SharingRules,
        changes: list[NodeChange],
        learn: bool,
        by: Decide,
        slow: Mapping[str, float],
    ) -> None:
        self.arrivals, self.nodes, self.rules, self.changes = arrivals[::-1], nodes, rules, changes[::-1]
        self.learn, self.by, self.slow = learn, by, slow
        self.sweeps: dict[str, SharedSweep] = {}
        self.live: dict[str, dict[str, _JobState]] = {}
        self.running: dict[Key, _JobState] = {}
        self.busy: dict[tuple[str, int], float] = {}
        self.used: dict[str, float] = {}
        self.done: dict[str, float] = {}
        self.ran: list[StayOnDevices] = []
        self.seen: dict[str, list[SeenSpeed]] = {}
        self.estimated: dict[str, tuple[PlannedJob, ...]] = {}
        self.stops = self.decisions = 0
        self.now = 0.0
        self.look_again: float | None = None

    def run(
        self, begin: SharedCluster | None, actual: Mapping[Key, PlannedJob], sure: Collection[Key]
    ) -> Replay:
        """Go from event to event until nothing is left, or nothing can happen any more."""
        if begin is not None:
            self.now, self.busy, self.used = begin.now, dict(begin.busy), dict(begin.used)
            for sweep in begin.sweeps:
                own = {job.name: actual.get((sweep.name, job.name), job.job) for job in sweep.jobs}
                if sweep.has_asked(self.now):
                    self._add_sweep(sweep, own, sure)
                else:
                    self.arrivals.append(Arrival(sweep, tuple(own.values())))
            self.arrivals.sort(key=_in_time, reverse=True)
            self._decide()
        at_once = 0
        while self.live or self.arrivals:
            then = self._next_moment()
            if then == math.inf:
                break
            at_once = at_once + 1 if then == self.now else 0
            assert at_once < _MOST_AT_ONCE, f"time stands still at {self.now}"
            self._advance(then)
            if self._process_events():
                self._decide()
        return Replay(self.done, tuple(self.ran), self.stops, self.decisions, self._state())

    def _add_sweep(
        self, sweep: SharedSweep, actual: Mapping[str, PlannedJob], sure: Collection[Key] = ()
    ) -> None:
        self.sweeps[sweep.name] = sweep
        self.live[sweep.name] = {}
        kinds = {node.name: node.kind for node in self.nodes}
        for job in sweep.jobs:
            if job.place is not None and job.place.node not in kinds:
                job = dataclasses.replace(job, place=None, leaving=None, setting_up=0.0)
            live = _JobState(job, actual[job.name], self.now)
            self.live[sweep.name][job.name] = live
            if job.place is not None:
                leaving = job.leaving
                slow = 1.0 if (sweep.name, job.name) in sure else self._slow(job.place)
                live.launch(job.place, kinds[job.place.node], self.now, slow, job.setting_up)
                live.shared = dataclasses.replace(live.shared, since=job.since, leaving=leaving)
                self.running[sweep.name, job.name] = live

    def _next_moment(self) -> float:
        """When the next event is; infinite where none will be."""
        found = [live.next_event for live in self.running.values()]
        if self.arrivals:
            found.append(self.arrivals[-1].at)
        if self.changes:
            found.append(self.changes[-1].at)
        # Where nothing else is to happen, looking again finds what it found, for ever.
        if self.look_again is not None and (found or self.busy):
            found.append(self.look_again)
        found += [until for until in self.busy.values() if until > self.now]
        return max(self.now, min(found, default=math.inf))

    def _advance(self, then: float) -> None:
        """Train until ``then``, and add up what teams use of the devices."""
        self.used = decayed(self.used, then - self.now)
        for (sweep, _), live in self.running.items():
            place = live.shared.place
            assert place is not None
            self.used = with_held(self.used, self.sweeps[sweep].team, place.devices, then - self.now)
            live.advance(then)
        self.now = then

    def _process_events(self) -> bool:
        """Deal with the events of this moment; whether any of them is worth a new decision."""
        worth = self.look_again is not None and self.now >= self.look_again - _SOON
        for key, live in list(self.running.items()):
            if live.shared.leaving is not None:
                if live.shared.leaving <= self.now + _SOON:
                    self._release(key, live)
                    worth = True
            elif live.done:
                self._release(key, live)
                self._job_done(key)
                worth = True
            elif live.speed_known_at <= self.now + _SOON:
                worth = self._note_speed(key, live) or worth
        # Both lists lie latest first: what comes next is taken off their ends.
        while self.changes and self.changes[-1].at <= self.now:
            self._change_nodes(self.changes.pop())
            worth = True
        while self.arrivals and self.arrivals[-1].at <= self.now:
            arrival = self.arrivals.pop()
            actual = arrival.actual or tuple(job.job for job in arrival.sweep.jobs)
            self._add_sweep(arrival.sweep, {job.name: job for job in actual})
            worth = True
        ended = [device for device, until in self.busy.items() if until <= self.now]
        for device in ended:
            del self.busy[device]
        return worth or bool(ended)

    def _release(self, key: Key, live: _JobState) -> None:
        """``live`` has left its devices."""
        place = live.shared.place
        assert place is not None
        self.ran.append(StayOnDevices(*key, place, live.began, self.now, live.left - live.rest))
        live.shared = dataclasses.replace(
            live.shared, left=live.rest, place=None, leaving=None, setting_up=0.0
        )
        live.speed_known_at = math.inf
        del self.running[key]

    def _job_done(self, key: Key) -> None:
        jobs = self.live[key[0]]
        del jobs[key[1]]
        if not jobs:
            del self.live[key[0]]
            self.done[key[0]] = self.now

    def _note_speed(self, key: Key, live: _JobState) -> bool:
        """The speed of ``live`` was seen, which corrects what is expected of its sweep's jobs.

        :returns: whether it is off by more than the set share, so that it is decided anew.
        """
        live.speed_known_at = math.inf
        place = live.shared.place
        assert place is not None
        live.known.add((place.technique, place.devices))
        if not self.learn:
            return False
        kind = next(node.kind for node in self.nodes if node.name == place.node)
        sweep = key[0]
        first = self.estimated.setdefault(sweep, tuple(job.job for job in self.sweeps[sweep].jobs))
        option = _option(next(job for job in first if job.name == key[1]), place)
        factor = live.net / (option.seconds[kind] - option.setup)
        now_expected = _option(live.shared.job, place)
        off = live.net / (now_expected.seconds[kind] - now_expected.setup)
        seen = self.seen.setdefault(sweep, [])
        # That one is right counts where others are not: their errors are then less likely to be shared.
        if abs(factor - 1) < _NOTHING and not seen:
            return False
        seen.append(SeenSpeed(key[1], place.technique, place.devices, kind, factor))
        for job in corrected_jobs(first, seen):
            if job.name in self.live[sweep]:
                other = self.live[sweep][job.name]
                other.shared = dataclasses.replace(other.shared, job=job)
        return abs(off - 1) > self.rules.off_by

    def _change_nodes(self, change: NodeChange) -> None:
        """A node comes; or it goes, and what its jobs trained since their last checkpoint is lost."""
        if isinstance(change.node, Node):
            self.nodes = (*self.nodes, change.node)
            return
        self.nodes = tuple(node for node in self.nodes if node.name != change.node)
        for key, live in list(self.running.items()):
            if live.shared.place is not None and live.shared.place.node == change.node:
                # Checkpoints are taken to come at equal distances from the launch, the set-up included.
                lost = (self.now - live.began) % _CHECKPOINT_SECONDS / live.net
                live.rest = min(live.left, live.rest + lost)
                self._release(key, live)

    def _state(self) -> SharedCluster:
        """The cluster as those see it who decide."""
        sweeps = tuple(
            dataclasses.replace(self.sweeps[name], jobs=tuple(live.view() for live in jobs.values()))
            for name, jobs in self.live.items()
        )
        return SharedCluster(self.now, self.nodes, sweeps, dict(self.busy), dict(self.used))

    def _decide(self) -> None:
        """Decide by the state of this moment, and carry that out."""
        self.decisions += 1
        state = self._state()
        found = self.by(state, self.rules)
        self.look_again = found.look_again
        for turn in found.stops:
            live = self.running[turn.sweep, turn.job]
            live.leave(self.now, self.rules.seconds_to_leave(live.shared))
            self.stops += 1
        for turn in found.starts:
            live = self.live[turn.sweep][turn.job]
            live.launch(turn.place, state.kinds[turn.place.node], self.now, self._slow(turn.place))
            self.running[turn.sweep, turn.job] = live

    def _slow(self, place: Place) -> float:
        return self.slow.get(place.node, 1.0)


def _in_time(arrival: Arrival) -> tuple[float, str]:
    return arrival.at, arrival.sweep.name


def _option(job: PlannedJob, place: Place) -> Option:
    return next(o for o in job.options if (o.technique, o.devices) == (place.technique, place.devices))
