"""A sweep on paper: wrong estimates, lost nodes, dropped jobs, and rounds that make the best of it.

Plans are made, kept and changed by the code that does it in production; only the training is made up. By
its seed a simulation is the same each time: searches count their steps, not seconds.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.learning import SeenSpeed, corrected
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import Histories, Rule, select
from saturn_airflow.planning.online.actual_seconds import Shape, truth, with_launches
from saturn_airflow.planning.online.adoption import LEAST_WIN, Adoption, Effort, decide
from saturn_airflow.planning.online.execution import Situation, Stretch, execute, option_of
from saturn_airflow.planning.online.replanning import on_nodes, stranded
from saturn_airflow.planning.planner import solve

#: A job that trained for this share of its batches has shown its speed.
_SEEN_AFTER = 0.002
#: No two boundaries are nearer than this share of the first plan's makespan.
_LEAST_ROUND = 0.01
_MOST_BOUNDARIES = 1000
_NOTHING = 1e-9


class NodeLoss(NamedTuple):
    """A node that is lost.

    :param share: when, as a share of the first plan's makespan.
    """

    node: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that moving a job takes.

    :param checkpoint: saving it.
    :param launch: launching it and loading its checkpoint, where its strategies don't say.
    :param checkpoint_every: seconds between the checkpoints of a running job.
    """

    checkpoint: float = 20.0
    launch: float = 40.0
    checkpoint_every: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Made-up learning curves: by job, a metric that falls with the epochs to a floor of its own.

    :param epochs: of each job.
    """

    epochs: int
    floors: Mapping[str, float]
    seed: int

    def history(self, job: str, trained: float) -> dict[float, float]:
        """The metric after each epoch of a job that has trained this share of its batches."""
        rng = random.Random(f"{self.seed} {job}")
        rate = rng.uniform(0.3, 0.7)
        values = {}
        for epoch in range(1, int(trained * self.epochs + 1e-9) + 1):
            values[float(epoch)] = self.floors[job] + math.exp(-rate * epoch) + rng.gauss(0, 0.01)
        return values


class SimulatedRound(NamedTuple):
    """One round.

    :param start: seconds from the sweep's start.
    :param why: why it began.
    :param adopted: whether it runs another plan than the one before.
    :param expected: when the sweep was then expected to end, in seconds from its start.
    """

    start: float
    why: str
    adopted: bool
    expected: float
    moved: tuple[str, ...] = ()
    pruned: tuple[str, ...] = ()
    plan: Plan | None = None


@dataclass(frozen=True)
class Simulation:
    """What came of it. Seconds count from the sweep's start.

    :param makespan: when the last job that was not dropped ended.
    :param planned: when the first plan said that would be.
    """

    makespan: float
    planned: float
    rounds: tuple[SimulatedRound, ...]
    stretches: tuple[Stretch, ...]
    pruned: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def moves(self) -> int:
        """How often a running job was stopped to go on elsewhere or later."""
        return sum(len(entry.moved) for entry in self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """This simulation as JSON-ready data."""
        return {
            "makespan": self.makespan,
            "planned": self.planned,
            "moves": self.moves,
            "pruned": list(self.pruned),
            "warnings": list(self.warnings),
            "rounds": [
                {
                    **{key: getattr(entry, key) for key in ("start", "why", "adopted", "expected")},
                    "moved": list(entry.moved),
                    "pruned": list(entry.pruned),
                }
                for entry in self.rounds
            ],
            "stretches": [
                {
                    "job": s.job,
                    **dataclasses.asdict(s.place),
                    "device_ids": list(s.place.device_ids),
                    "start": s.start,
                    "end": s.end,
                    "trained": s.trained,
                }
                for s in self.stretches
            ],
        }


def simulate(
    problem: Problem,
    *,
    rounds: Rounds,
    noise: float = 0.2,
    seed: int = 0,
    shape: Shape = "mixed",
    failures: Sequence[NodeLoss] = (),
    selection: Rule | None = None,
    epochs: int = 8,
    costs: Costs | None = None,
    time_limit: float = 1.0,
    learn: bool = True,
    foresight: bool = True,
    least_win: float = LEAST_WIN,
    least_seconds: float = 0.0,
) -> Simulation:
    """Simulate a sweep.

    :param failures: nodes that are lost on the way.
    :param selection: drops jobs at boundaries, by made-up learning curves.
    :param epochs: of each job, for the curves.
    :param time_limit: of each search, in thousands of its steps; about seconds on a fast machine.
    :param learn: whether speeds that were seen correct estimates.
    :param foresight: whether plans look beyond the next boundary.
    :param least_win: see :func:`decide`, as is ``least_seconds``.
    :raises InvalidSweepError: for noise below 0, or a failure that can't be.
    """
    costs = costs or Costs()
    _check(problem, noise, failures)
    estimated = with_launches(problem, costs.launch)
    return _Sweep(
        estimated,
        truth(estimated, noise, seed, shape),
        rounds,
        sorted(failures, key=lambda failure: failure.share),
        selection,
        _curves(problem, epochs, seed),
        costs,
        _Search(
            Effort(time_limit=time_limit, seed=seed, repeatable=True),
            learn,
            foresight,
            least_win,
            least_seconds,
        ),
    ).run()


def clairvoyant(
    problem: Problem,
    *,
    noise: float,
    seed: int,
    shape: Shape = "mixed",
    costs: Costs | None = None,
    time_limit: float = 1.0,
) -> float:
    """The makespan of the plan of one who knows what jobs take, and plans once."""
    estimated = with_launches(problem, (costs or Costs()).launch)
    return solve(
        truth(estimated, noise, seed, shape), time_limit=time_limit, seed=seed, repeatable=True
    ).makespan


class _Search(NamedTuple):
    """How plans are made and changed; see :func:`simulate`."""

    effort: Effort
    learn: bool
    foresight: bool
    least_win: float
    least_seconds: float


class _Sweep:
    """The state of a simulated sweep.

    Plans are made from the ``estimated`` seconds; the ``actual`` ones are what jobs really take.
    """

    def __init__(
        self,
        estimated: Problem,
        actual: Problem,
        rounds: Rounds,
        failures: Sequence[NodeLoss],
        selection: Rule | None,
        curves: Curves,
        costs: Costs,
        search: _Search,
    ) -> None:
        self.estimated, self.actual = estimated, actual
        self.rounds, self.failures, self.selection = rounds, list(failures), selection
        self.curves, self.costs, self.search = curves, costs, search
        self.now = 0.0
        self.situation = Situation({job.name: 1.0 for job in estimated.jobs})
        self.stretches: list[Stretch] = []
        self.seen: list[SeenSpeed] = []
        self.pruned: list[str] = []
        self.warnings: list[str] = []
        self.used = 1
        #: The share of their batches that jobs are to reach in this round.
        self.goal = 1.0

    def run(self) -> Simulation:
        """Advance to the next boundary or lost node and decide there, until all jobs have ended."""
        found = self._decide(None)
        plan, length = found.plan, found.length
        planned = found.expected
        self.least = planned * _LEAST_ROUND
        self.failures = [f._replace(share=f.share * planned) for f in self.failures]
        history = [SimulatedRound(0.0, "the first plan", True, planned, plan=plan)]
        self.used, begun = 1, 0.0
        for _ in range(_MOST_BOUNDARIES):
            last = self.used >= self.rounds.most
            lost_at = self.failures[0].share if self.failures else math.inf
            ends = math.inf if last else begun + self._length(plan, length)
            self._advance(plan, min(lost_at, ends) - self.now)
            if not self.situation.left:
                break
            lost = lost_at <= self.now
            if lost:
                self._lose(self.failures.pop(0))
            if last and not self._stuck(plan):
                # Without a round left, the jobs of a lost node wait until nothing else can run.
                continue
            why = "a node was lost" if lost else "what a lost node left" if last else "a round ended"
            dropped = self._select()
            if not self.situation.left:
                break
            self.used, begun = self.used + 1, self.now
            found = self._decide(plan)
            plan, length = found.plan, found.length
            expected = self.now + found.expected
            history.append(SimulatedRound(begun, why, found.adopted, expected, found.moved, dropped, plan))
        else:
            raise AssertionError("the simulated sweep does not end")
        return Simulation(
            max((s.end for s in self.stretches), default=0.0),
            planned,
            tuple(history),
            tuple(self.stretches),
            tuple(self.pruned),
            tuple(self.warnings),
        )

    def _length(self, plan: Plan, length: float) -> float:
        """Seconds that the round of ``plan``, which begins now, lasts."""
        policy = self.rounds
        if policy.off_by is not None:
            run = execute(self.actual, plan, self._view(), checkpoint=self.costs.checkpoint)
            ends = {a.job: a.end for a in plan.assignments}
            shown = [
                s.start + self.least
                for s in run.stretches
                if policy.strayed(s.end, ends[s.job], plan.makespan)
            ]
            length = min([length, *shown])
        return max(length, self.least)

    def _advance(self, plan: Plan, seconds: float) -> None:
        """Train by ``plan`` for so many seconds, or until all is done, and note the speeds that were seen."""
        run = execute(self.actual, plan, self._view(), until=seconds, checkpoint=self.costs.checkpoint)
        for s in run.stretches:
            self.stretches.append(dataclasses.replace(s, start=self.now + s.start, end=self.now + s.end))
            if s.trained > _SEEN_AFTER:
                kind = next(n.kind for n in self.estimated.nodes if n.name == s.place.node)
                real, expected = (
                    option_of(p, s.job, s.place.technique, s.place.devices)
                    for p in (self.actual, self.estimated)
                )
                factor = (real.seconds[kind] - real.setup) / (expected.seconds[kind] - expected.setup)
                self.seen.append(SeenSpeed(s.job, s.place.technique, s.place.devices, kind, factor))
        # What :meth:`_view` left out of account for this round's goal is still to be trained.
        left = {job: run.situation.left.get(job, 0.0) + 1 - self.goal for job in self.situation.left}
        left = {job: share for job, share in left.items() if share > _NOTHING}
        self.situation = dataclasses.replace(run.situation, left=left)
        self.now += run.end

    def _stuck(self, plan: Plan) -> bool:
        """Whether nothing can run by ``plan`` any more."""
        return not execute(self.actual, plan, self._view(), checkpoint=0.0).stretches

    def _goal(self, last: bool) -> float:
        """How far jobs train in the round that begins: to the end, or the next rung of the last of them."""
        if last or self.selection is None:
            return 1.0
        behind = max(self.situation.left.values())
        epochs = self.curves.epochs
        return min(1.0, self.selection.next_rung((1 - behind) * epochs + _NOTHING) / epochs)

    def _view(self) -> Situation:
        """The situation as if jobs had to reach the goal of this round only."""
        left = {job: share - (1 - self.goal) for job, share in self.situation.left.items()}
        return dataclasses.replace(
            self.situation, left={job: share for job, share in left.items() if share > _NOTHING}
        )

    def _lose(self, failure: NodeLoss) -> None:
        """The node is gone, and with it what its jobs trained since their last checkpoint."""
        left, running = dict(self.situation.left), dict(self.situation.running)
        for job, place in self.situation.running.items():
            if place.node != failure.node:
                continue
            del running[job]
            at = max(i for i, s in enumerate(self.stretches) if s.job == job)
            stretch = self.stretches[at]
            # Checkpoints are written every so many seconds from the start of a stretch.
            unsaved = (stretch.end - stretch.start) % self.costs.checkpoint_every
            trained = stretch.trained * max(0.0, 1 - unsaved / (stretch.end - stretch.start))
            self.stretches[at] = dataclasses.replace(stretch, trained=trained)
            left[job] += stretch.trained - trained
        nodes = tuple(n for n in self.actual.nodes if n.name != failure.node)
        self.situation = Situation(left, running, self.situation.setting_up)
        # What is done must not bind the rest to a node that is gone.
        done = set(stranded(self.actual, nodes)) - left.keys()
        self.seen = [speed for speed in self.seen if speed.job not in done]
        self.actual, self.estimated = (
            on_nodes(dataclasses.replace(p, jobs=tuple(j for j in p.jobs if j.name not in done)), nodes)
            for p in (self.actual, self.estimated)
        )

    def _select(self) -> tuple[str, ...]:
        """The jobs that selection drops now."""
        if self.selection is None:
            return ()
        going = list(self.situation.left)
        found = select(self.selection, self._histories(), going, self.selection.metric)
        self.warnings += found.warnings
        self.pruned += found.pruned
        keep = {job: left for job, left in self.situation.left.items() if job not in found.pruned}
        running = {job: place for job, place in self.situation.running.items() if job in keep}
        self.situation = Situation(keep, running, self.situation.setting_up)
        return found.pruned

    def _histories(self) -> Histories:
        trained: dict[str, float] = {job.name: 0.0 for job in self.estimated.jobs}
        for s in self.stretches:
            trained[s.job] = trained.get(s.job, 0.0) + s.trained
        return {job: self.curves.history(job, share) for job, share in trained.items()}

    def _decide(self, plan: Plan | None) -> Adoption:
        """Carry ``plan`` on or adopt another, from what is known at this moment."""
        last = self.used >= self.rounds.most
        self.goal = self._goal(last)
        # Where jobs wait for each other at a rung, that is what ends a round.
        whole = last or (self.goal < 1 and not self.rounds.says_when)
        return decide(
            corrected(self.estimated, self.seen) if self.search.learn else self.estimated,
            plan,
            self._view(),
            effort=self.search.effort,
            checkpoint=self.costs.checkpoint,
            length=(lambda makespan: math.inf) if whole else self.rounds.length,
            least_win=self.search.least_win,
            least_seconds=self.search.least_seconds,
            foresight=self.search.foresight,
        )


def _curves(problem: Problem, epochs: int, seed: int) -> Curves:
    rng = random.Random(seed)
    return Curves(epochs=epochs, floors={job.name: rng.uniform(0.1, 1.0) for job in problem.jobs}, seed=seed)


def _check(problem: Problem, noise: float, failures: Sequence[NodeLoss]) -> None:
    if not 0 <= noise < math.inf:
        raise InvalidSweepError(f"noise is {noise!r}; give how far estimates are off, such as 0.2 for 20%")
    names = [node.name for node in problem.nodes]
    for failure in failures:
        if failure.node not in names:
            raise InvalidSweepError(
                f"there is no node {failure.node!r} to lose; there are {', '.join(names)}"
            )
        if not 0 <= failure.share < math.inf:
            raise InvalidSweepError(
                f"node {failure.node!r} is lost at {failure.share!r}; give a share of the makespan, from 0"
            )
    if len({failure.node for failure in failures}) == len(names):
        raise InvalidSweepError("all nodes are lost; leave at least one")
