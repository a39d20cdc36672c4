"""A cluster that several sweeps share: what remains of each, what runs where, and rules of turns."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob, Problem

#: Seconds in which a job's processes end once its checkpoint is written.
_ENDING = 1.0


@dataclass(frozen=True)
class SharedJob:
    """What is known of a job that is not done. Times are seconds of one clock, such as that of the epoch.

    :param job: its strategies with the seconds that are expected of them now, and the nodes it may run on.
    :param left: the share of its batches that is still to be trained.
    :param place: where it runs; None while it waits.
    :param since: when it was launched there.
    :param setting_up: seconds that it still needs there until it trains.
    :param leaving: it was told to write a checkpoint and give way; when its devices are free.
    :param stopped: when it was last told so.
    :param leaves_in: seconds that it takes to write its checkpoint and leave, see :func:`seconds_to_leave`;
        None where nothing is known of that.
    :param keeps: technique and number of devices under which it runs in whatever turn; None where its turn
        decides.
    """

    job: PlannedJob
    left: float = 1.0
    place: Place | None = None
    since: float = 0.0
    setting_up: float = 0.0
    leaving: float | None = None
    stopped: float | None = None
    leaves_in: float | None = None
    keeps: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        """The job's name, unique in its sweep."""
        return self.job.name

    @property
    def option(self) -> Option:
        """The strategy that it runs under."""
        assert self.place is not None, "the job does not run"
        wanted = self.place.technique, self.place.devices
        return next(o for o in self.job.options if (o.technique, o.devices) == wanted)

    def as_kept(self) -> SharedJob:
        """This job with no other strategy than the one that it keeps, if it waits."""
        own = tuple(o for o in self.job.options if (o.technique, o.devices) == self.keeps)
        if self.place is not None or not own:
            return self
        return dataclasses.replace(self, job=dataclasses.replace(self.job, options=own))

    @cached_property
    def needs(self) -> dict[tuple[Node, ...], Any]:
        """What was found of what it still needs on some nodes, so that it is found once."""
        return {}

    @property
    def place_ids(self) -> tuple[int, ...]:
        """The devices that it runs on; none while it waits."""
        return () if self.place is None else self.place.device_ids

    def to_dict(self) -> dict[str, Any]:
        """This job as JSON-ready data."""
        place = None if self.place is None else dataclasses.asdict(self.place)
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**own, "job": self.job.to_dict(), "place": place}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SharedJob:
        """The job that :meth:`to_dict` described.

        :raises InvalidSweepError: when a value can't be right.
        """
        place = data.get("place")
        if place is not None:
            place = Place(**{**formats.known_fields(Place, place), "device_ids": tuple(place["device_ids"])})
            whole = [place.devices, *place.device_ids]
            if not isinstance(place.node, str) or any(type(number) is not int for number in whole):
                raise InvalidSweepError(f"a job's place is {place!r:.200}")
        own = formats.known_fields(cls, data)
        _check_numbers(own, ("left", "since", "setting_up"), ("leaving", "stopped", "leaves_in"))
        if (keeps := own.get("keeps")) is not None:
            match keeps:
                case [str(technique), int(devices)]:
                    own["keeps"] = technique, devices
                case _:
                    raise InvalidSweepError(f"what a job keeps is {keeps!r:.200}")
        job = PlannedJob.from_dict(data["job"])
        for option in job.options:
            _check_option(option)
        return cls(**{**own, "job": job, "place": place})


def _check_option(option: Option) -> None:
    numbers = [*option.seconds.values(), option.setup]
    right = all(type(number) in (int, float) and 0 <= number <= sys.float_info.max for number in numbers)
    if type(option.devices) is not int or option.devices < 1 or not right:
        raise InvalidSweepError(f"a strategy of a job is {option!r:.200}")


def _check_numbers(fields: Mapping[str, Any], names: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for name in (*names, *optional):
        value = fields.get(name, None if name in optional else 0.0)
        none = value is None and name in optional
        # What fits on no node that is up would take for ever, alone.
        right = type(value) in (int, float) and (math.isfinite(value) or (name, value) == ("alone", math.inf))
        if not none and not right:
            raise InvalidSweepError(f"{name} is {value!r:.80}, which is no number of seconds or the like")


@dataclass(frozen=True)
class Pace:
    """How fast a job was seen to train where it runs.

    :param share: the share of its batches that it trained
    :param seconds: in so many, with all that came between them.
    :param saw_epoch_end: whether an epoch ended in it, and with that what is done at each end.
    """

    share: float
    seconds: float
    saw_epoch_end: bool


@dataclass(frozen=True)
class SharedSweep:
    """A sweep that is not done. Times are seconds of one clock, such as that of the epoch.

    :param jobs: those that are not done.
    :param arrived: when it began to want devices.
    :param alone: the least seconds it would have taken from then on with the cluster to itself; see
        :func:`least_seconds`.
    :param priority: sweeps of a higher one go first.
    :param team: whose it is; empty for nobody's.
    :param deadline: when it is to be done.
    :param preempt: whether its running jobs may be stopped at a checkpoint, to go on later or elsewhere.
    :param trials: whether it is still measured: its jobs are trials, which are short.
    :param asks: when its jobs ask for devices; before that they have none.
    :param elsewhere: device-seconds that it needs besides, of jobs on other nodes and those that have not
        asked, where only those that wait at one node are known: its turn would else come before that of
        sweeps which are done sooner.
    """

    name: str
    jobs: tuple[SharedJob, ...]
    arrived: float
    alone: float
    priority: float = 0.0
    team: str = ""
    deadline: float | None = None
    preempt: bool = False
    trials: bool = False
    asks: float = 0.0
    elsewhere: float = 0.0

    def as_kept(self) -> SharedSweep:
        """This sweep with jobs that wait as :meth:`SharedJob.as_kept` has them."""
        return dataclasses.replace(self, jobs=tuple(job.as_kept() for job in self.jobs))

    def has_asked(self, now: float) -> bool:
        """Whether its jobs want devices at this moment; those that have some did before it was expected."""
        return self.asks <= now or any(job.place is not None for job in self.jobs)

    def to_dict(self) -> dict[str, Any]:
        """This sweep as JSON-ready data."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**own, "jobs": [job.to_dict() for job in self.jobs]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SharedSweep:
        """The sweep that :meth:`to_dict` described.

        :raises InvalidSweepError: when a value can't be right.
        """
        own = formats.known_fields(cls, data)
        _check_numbers(own, ("arrived", "alone", "priority", "asks", "elsewhere"), ("deadline",))
        if not isinstance(data["name"], str) or not isinstance(own.get("team", ""), str):
            raise InvalidSweepError(
                f"a sweep's name is {data['name']!r:.80}, its team {own.get('team')!r:.80}"
            )
        return cls(**{**own, "jobs": tuple(SharedJob.from_dict(job) for job in data["jobs"])})


@dataclass(frozen=True)
class SharedCluster:
    """All of a deployment at one moment.

    :param now: the moment, in seconds.
    :param nodes: those that are up. What runs on others is lost: its jobs wait.
    :param busy: by node and device, when it is free of what is no job of these sweeps: a trial, a stranger.
    :param used: by team, device-seconds of late, for their shares; see :mod:`saturn_airflow.sharing.use`.
    """

    now: float
    nodes: tuple[Node, ...]
    sweeps: tuple[SharedSweep, ...]
    busy: Mapping[tuple[str, int], float] = field(default_factory=dict)
    used: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of each node's devices."""
        return {node.name: node.kind for node in self.nodes}

    @property
    def planned(self) -> list[str]:
        """The sweeps of which it is known what they want: those that are measured have no plan yet."""
        return [sweep.name for sweep in self.sweeps if not sweep.trials]

    @property
    def devices(self) -> int:
        """How many there are."""
        return sum(node.devices for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """This state as JSON-ready data."""
        return {
            **formats.stamp("a shared cluster"),
            "now": self.now,
            "nodes": [node.to_dict() for node in self.nodes],
            "sweeps": [sweep.to_dict() for sweep in self.sweeps],
            "busy": [[*device, until] for device, until in self.busy.items()],
            "used": dict(self.used),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SharedCluster:
        """The state that :meth:`to_dict` described.

        :raises NewerFormatError: when a newer version wrote it.
        """
        formats.check(data, "a shared cluster", "the state of the cluster")
        return cls(
            data["now"],
            tuple(Node(**formats.known_fields(Node, node)) for node in data["nodes"]),
            tuple(SharedSweep.from_dict(sweep) for sweep in data["sweeps"]),
            {(node, device): until for node, device, until in data.get("busy", [])},
            dict(data.get("used", {})),
        )


@dataclass(frozen=True, kw_only=True)
class SharingRules:
    """By which rules sweeps take turns.

    :param checkpoint: seconds that a job takes to write its checkpoint and leave of which nothing is known.
    :param win: how many times what it costs a stop or a change of width must win.
    :param quiet: seconds for which a job that was stopped is not stopped again.
    :param largest_stretch: a sweep that is about to take this many times what it would take alone goes first
        among those of its priority, and before all others at a fifth more.
    :param shares: by team, its share of the devices when others want them too. Teams not named share alike
        what is left.
    :param look_every: seconds after which to look again while somebody waits.
    :param off_by: plan anew when a job is off by more than this share of what it was expected to take.
    """

    checkpoint: float = 20.0
    win: float = 3.0
    quiet: float = 900.0
    largest_stretch: float = 10.0
    shares: Mapping[str, float] = field(default_factory=dict)
    look_every: float = 600.0
    off_by: float = 0.1

    def __post_init__(self) -> None:
        for name in ("checkpoint", "win", "quiet", "off_by"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidSweepError(f"{name} is {value!r}; give a finite number, 0 or more")
        if not self.largest_stretch >= 1:
            raise InvalidSweepError(f"largest_stretch is {self.largest_stretch!r}; give 1 or more")
        if not self.look_every > 0:
            raise InvalidSweepError(f"look_every is {self.look_every!r}; give seconds, more than 0")
        if any(not 0 < share <= 1 for share in self.shares.values()) or sum(self.shares.values()) > 1 + 1e-9:
            raise InvalidSweepError(
                f"shares are {dict(self.shares)!r}; each is above 0, and together they are at most 1"
            )

    def seconds_to_leave(self, job: SharedJob) -> float:
        """What ``job`` takes to write its checkpoint and leave."""
        return self.checkpoint if job.leaves_in is None else job.leaves_in

    def was_just_stopped(self, job: SharedJob, now: float) -> bool:
        """Whether ``job`` was stopped so lately that it is not stopped again."""
        # A clock that was set back by a day must not have it stay for a day.
        return job.stopped is not None and abs(now - job.stopped) < self.quiet


def seconds_to_leave(checkpoint: float, step: float) -> float:
    """Seconds that a job takes from being told to leave until its devices are free.

    :param checkpoint: seconds that writing one takes.
    :param step: seconds of a training step, at whose end it looks.
    """
    return step + checkpoint + _ENDING


def least_seconds(jobs: tuple[PlannedJob, ...], nodes: tuple[Node, ...]) -> float:
    """A lower bound of a sweep's seconds with these nodes to itself: its longest job, or its area.

    :raises InvalidSweepError: when a job fits on no node.
    """
    Problem("sweep", nodes, jobs)
    longest = area = 0.0
    for job in jobs:
        fitting = [(o, n) for o in job.options for n in nodes if Problem.fits(job, o, n)]
        longest = max(longest, min(o.seconds[n.kind] for o, n in fitting))
        area += min(o.seconds[n.kind] * o.devices for o, n in fitting)
    return max(longest, area / sum(node.devices for node in nodes))
