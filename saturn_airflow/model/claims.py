"""What a job that wants or holds devices of a node tells the jobs of other sweeps that want them too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from saturn_airflow.model import formats
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import Pace, SharedJob, SharedSweep

CLAIM = "a claim"
#: What its own node is called in a claim, and its kind of devices: nobody else's claim is of another.
HERE = "here"
#: For how long a trial is expected to have its devices.
TRIAL_SECONDS = 60.0
#: With more teams than this, what somebody wrote is no claim.
_MOST_TEAMS = 1000


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim of one job, or of one trial, on devices of its node.

    :param sweep: its sweep, with this job alone. Its strategies' seconds and its place are those of the node
        :data:`HERE`.
    :param made: when the plan was made that sent it here, in seconds since the epoch.
    :param technique: the planned one.
    :param by_plan: whether it may still run as planned: no other sweep has met it here.
    :param shares: of the teams, as the deployment gave them out when it was made.
    :param pace: how fast the job was seen to train where it runs; None where nothing was seen yet.
    """

    sweep: SharedSweep
    made: float
    technique: str
    by_plan: bool = True
    shares: Mapping[str, float] = field(default_factory=dict)
    pace: Pace | None = None

    @property
    def job(self) -> SharedJob:
        """The job."""
        return self.sweep.jobs[0]

    @property
    def sweep_here(self) -> str:
        """Its sweep's name among all that share the node: deployments that share its folder of leases, such
        as those for staging and for production, may have DAGs and runs of the same names."""
        return f"{self.sweep.name} since {self.sweep.arrived!r}"

    @property
    def key(self) -> tuple[str, str]:
        """The names of sweep and job, among all that share the node."""
        return self.sweep_here, self.job.name

    def with_job(self, **changes: Any) -> Claim:
        """This claim with other facts of its job, fields of :class:`SharedJob`."""
        return replace(self, sweep=replace(self.sweep, jobs=(replace(self.job, **changes),)))

    def to_dict(self) -> dict[str, Any]:
        """This claim as JSON-ready data."""
        own: dict[str, Any] = {"made": self.made, "technique": self.technique, "by_plan": self.by_plan}
        own |= {"shares": dict(self.shares), "pace": None if self.pace is None else asdict(self.pace)}
        return {**formats.stamp(CLAIM), "sweep": self.sweep.to_dict(), **own}

    @classmethod
    def from_dict(cls, data: Any) -> Claim:
        """The claim that :meth:`to_dict` described; anybody may have written it.

        :raises ValueError: when it can't be a claim.
        """
        try:
            formats.check(data, CLAIM, "a job's claim")
            found = cls(
                sweep=SharedSweep.from_dict(data["sweep"]),
                made=float(data["made"]),
                technique=str(data["technique"]),
                by_plan=data["by_plan"] is True,
                shares={str(team): float(share) for team, share in data.get("shares", {}).items()},
                pace=_pace(data.get("pace")),
            )
            _check(found)
        except (KeyError, TypeError, AttributeError, StopIteration, formats.NewerFormatError) as error:
            raise ValueError(f"no claim: {error}") from None
        return found


def claim_of(
    sweep: SharedSweep,
    job: str,
    technique: str,
    strategies: Mapping[tuple[str, int], tuple[float, float]],
    made: float,
    leaves_in: float | None = None,
    shares: Mapping[str, float] | None = None,
) -> Claim:
    """A waiting job's claim.

    :param sweep: its sweep, of which only the facts count, not the jobs.
    :param technique: the planned one.
    :param strategies: by technique and number of devices, seconds of the whole training on this node, and
        seconds of them that are set-up.
    :param leaves_in: what is known of that.
    :param shares: of the teams.
    """
    options = tuple(
        Option(technique, devices, {HERE: seconds}, min(setup, seconds))
        for (technique, devices), (seconds, setup) in strategies.items()
    )
    facts = replace(sweep, jobs=(SharedJob(PlannedJob(job, options), leaves_in=leaves_in),))
    return Claim(sweep=facts, made=made, technique=technique, shares=shares or {})


def claim_of_trial(
    sweep: SharedSweep, trial: str, technique: str, devices: int, made: float, shares: Mapping[str, float]
) -> Claim:
    """A waiting trial's claim: to others it is a sweep of its own, of one short job.

    :param sweep: of the jobs that are measured; only its name, priority and team count.
    :param trial: its name, unique in the sweep.
    :param made: when it was decided to measure, in seconds since the epoch.
    :param shares: of the teams.
    """
    facts = SharedSweep(
        name=f"{sweep.name}: {trial}",
        jobs=(),
        arrived=sweep.arrived,
        alone=TRIAL_SECONDS,
        priority=sweep.priority,
        team=sweep.team,
        trials=True,
    )
    seconds = {(technique, devices): (TRIAL_SECONDS, 0.0)}
    return claim_of(facts, trial, technique, seconds, made, shares=shares)


def node_of(devices: int) -> Node:
    """The node as claims call it."""
    return Node(HERE, devices=devices, kind=HERE)


def _pace(data: Any) -> Pace | None:
    if data is None:
        return None
    pace = Pace(float(data["share"]), float(data["seconds"]), data["saw_epoch_end"] is True)
    if not 0 <= pace.share <= 1 or not 0 <= pace.seconds < math.inf:
        raise ValueError("no claim: its pace can't be")
    return pace


def _check(claim: Claim) -> None:
    """Raise ValueError for a claim with values that can't be right."""
    (job,) = claim.sweep.jobs
    numbers = [claim.made, claim.sweep.arrived, claim.sweep.alone, claim.sweep.priority]
    numbers += [job.left, job.since, job.setting_up, claim.sweep.elsewhere]
    known = claim.sweep.deadline, job.leaving, job.stopped, job.leaves_in
    numbers += [n for n in known if n is not None]
    for option in job.job.options:
        numbers += [option.seconds[HERE], option.setup, option.devices]
        if option.devices < 1 or not 0 <= option.setup <= option.seconds[HERE]:
            raise ValueError("a strategy that can't be")
    if not job.job.options or not all(map(math.isfinite, numbers)) or not 0 <= job.left <= 1:
        raise ValueError("no claim: it tells no strategies, or numbers that can't be")
    if claim.sweep.elsewhere < 0:
        raise ValueError("no claim: less than nothing is left of its sweep elsewhere")
    if job.leaves_in is not None and job.leaves_in < 0:
        raise ValueError("no claim: it leaves before it is told to")
    if len(claim.shares) > _MOST_TEAMS or not all(0 < share <= 1 for share in claim.shares.values()):
        raise ValueError("no claim: its shares are none")
    if sum(claim.shares.values()) > 1 + 1e-9:
        raise ValueError("no claim: its shares are more than there is")
    if not isinstance(claim.sweep.name, str) or not isinstance(job.name, str):
        raise ValueError("no claim: it names no job")
    if not isinstance(claim.sweep.team, str):
        raise ValueError("no claim: its team has no name")
    place: Place | None = job.place
    if place is not None and (place.node != HERE or len(set(place.device_ids)) != place.devices):
        raise ValueError("no claim: its job is elsewhere")
    if place is not None:
        assert job.option is not None
