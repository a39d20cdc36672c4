"""What is known of a sweep's jobs, and what there is to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from saturn_airflow import library
from saturn_airflow.model import guards
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.estimates import Estimate, Key
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.problem import PlannedJob, Problem
from saturn_airflow.profiling.host_parts import NOTHING_SEEN, HostBytes
from saturn_airflow.profiling.options import Estimates, options_of, ran_out
from saturn_airflow.profiling.trials import Candidate, Strategies, strategies
from saturn_airflow.profiling.unmeasured import hopeless, interpolated, optimistic

# On nodes with more devices than this, only powers of two (and all devices) are considered.
_MOST_COUNTS = 16


@dataclass(frozen=True)
class Knowledge:
    """A sweep's jobs, their strategies, and what earlier trials and sweeps say of these.

    :param grid: strategies on powers of two of devices, and on all that a node has.
    :param between: strategies on other numbers of devices; empty where nodes are large.
    :param known: what was measured, works or not.
    :param broken: names of jobs that can't be trained, such as those whose own code raises: nothing more is
        measured with or for them.
    :param memory: bytes that jobs may have on nodes, as far as that was seen.
    """

    jobs: tuple[Job, ...]
    cluster: Cluster
    grid: Strategies
    between: Strategies
    known: Estimates
    broken: frozenset[str] = frozenset()
    memory: HostBytes = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        jobs: Sequence[Job],
        cluster: Cluster,
        techniques: Sequence[str] | None,
        known: Iterable[Estimate] = (),
        broken: Collection[str] = (),
        memory: HostBytes = NOTHING_SEEN,
    ) -> Knowledge:
        """Put it together; of what is known twice the last counts, and what this sweep can't use is left out.

        :param techniques: names to try; None for the whole library.
        :raises saturn_airflow.model.errors.InvalidSweepError: for a technique that is not in the library.
        """
        grid, _ = strategies(jobs, cluster, techniques)
        every, _ = strategies(
            jobs, cluster, techniques, lambda n: range(1, n.devices + 1) if n.devices <= _MOST_COUNTS else ()
        )
        between = {key: candidate for key, candidate in every.items() if key not in grid}
        candidates = {**grid, **between}
        usable = {
            e.key: e
            for e in known
            if e.key in candidates
            and e.version == candidates[e.key].version
            and not (e.reason and e.verdicts and _suits_others(e, candidates[e.key]))
        }
        return cls(tuple(jobs), cluster, grid, between, usable, frozenset(broken), memory)

    @property
    def strategies(self) -> dict[Key, Candidate]:
        """All that could be measured."""
        return {**self.grid, **self.between}

    def beside(self, key: Key) -> list[Estimate]:
        """What is known of the same fingerprint on the same kind of device."""
        return [e for e in self.known.values() if (e.fingerprint, e.kind) == (key.fingerprint, key.kind)]

    @property
    def own(self) -> frozenset[str]:
        """The techniques that are the user's."""
        return frozenset(
            name for name in {key.technique for key in self.grid} if not library.is_saturns(name)
        )

    def untried(self) -> list[Key]:
        """Strategies of the grid that were not measured, and are not known to fail, nor to be needless."""
        own = self.own
        return [
            key
            for key in self.grid
            if key not in self.known
            and not self.grid[key].jobs.keys() <= self.broken
            and not hopeless(key, self.beside(key), own)
            and not self._is_needless(key)
            and not self._hangs_alone(key)
        ]

    def _hangs_alone(self, key: Key) -> bool:
        """Whether the trial of another strategy hung in what this one's would begin with."""
        trusting = any(key.technique in job.trust for job in self.grid[key].jobs.values())
        return not trusting and any(e.hung_alone for e in self.beside(key))

    def _is_needless(self, key: Key) -> bool:
        """Whether it would give speed for memory that is there: others work on no more devices."""
        candidate = self.grid[key]
        return candidate.spares_memory and any(
            e.works
            and e.devices <= key.devices
            and not _spares_memory(e)
            and not all(ran_out(job, e) for job in candidate.jobs.values())
            for e in self.beside(key)
        )

    def interpolated(self) -> dict[Key, Estimate]:
        """Estimates of what was not measured and lies between measured numbers of devices."""
        lines: dict[tuple[str, str, str], list[Estimate]] = {}
        for e in self.known.values():
            lines.setdefault((e.fingerprint, e.technique, e.kind), []).append(e)
        counts: dict[tuple[str, str, str], list[int]] = {}
        for key in self.strategies:
            if key not in self.known:
                counts.setdefault((key.fingerprint, key.technique, key.kind), []).append(key.devices)
        return {e.key: e for line, group in lines.items() for e in interpolated(group, counts.get(line, ()))}

    def hopes(self) -> dict[Key, Estimate]:
        """The best that each unmeasured strategy could turn out to be."""
        found = {}
        for key in self.untried():
            if (hope := optimistic(key, self.beside(key), _spares_memory)) is not None:
                found[key] = hope
        for key, e in self.interpolated().items():
            found[key] = dataclasses.replace(e, seconds_per_batch=e.seconds_per_batch * (1 - e.uncertainty))
        return found

    def problem(self, estimates: Estimates) -> Problem | None:
        """The jobs that ``estimates`` say something of, to plan; None where there are none."""
        planned = []
        for job in self.jobs:
            if job.name in self.broken:
                continue
            if options := options_of(job, estimates, self.cluster, self.memory):
                planned.append(PlannedJob(job.name, options, self.cluster.among(job.nodes)))
        return Problem("trials", self.cluster.nodes, tuple(planned)) if planned else None


def _suits_others(refused: Estimate, candidate: Candidate) -> bool:
    """Whether a strategy that the guard refused for some jobs is a candidate for others it never saw."""
    return any(guards.mark(job, refused.version) not in refused.verdicts for job in candidate.jobs.values())


def _spares_memory(estimate: Estimate) -> bool:
    return library.get(estimate.technique).spares_memory(estimate.parameters)
