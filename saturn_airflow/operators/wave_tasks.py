"""What a sweep knows so far, and the task that decides what to measure next."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context, conf
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.core_use import CoreUse
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plan import Plan
from saturn_airflow.model.problem import Problem
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators import memory_records
from saturn_airflow.operators.airflow_internals import skip_tasks
from saturn_airflow.operators.context import SweepContext, pull_all, pull_from_trials, use_techniques_folder
from saturn_airflow.operators.others import tell_of_trials
from saturn_airflow.operators.presence import left_out_now, present
from saturn_airflow.operators.profile_task import ESTIMATE_KEY, broken_of
from saturn_airflow.operators.xcom_parts import ListingOperator

if TYPE_CHECKING:
    from saturn_airflow.model.estimates import Key
    from saturn_airflow.profiling.knowledge import Knowledge

# Planning to see what to measure takes this share of the time limit, no more seconds than that, and stops at
# this gap.
_SHARE, _MOST_SECONDS = 0.2, 2.0
_GAP = 0.003


@dataclass(frozen=True)
class Learned:
    """What the tasks before this one found out.

    :param fresh: what this sweep measured.
    :param broken: why each job that a trial found broken can't be trained, by the job's name.
    :param trials: how many trials that took.
    :param attempt: of the task that listed the first trials.
    """

    knowledge: Knowledge
    fresh: list[Estimate]
    broken: dict[str, str]
    trials: int
    attempt: float

    @classmethod
    def of(
        cls, context: Context, settings: SweepSettings, profile_tasks: list[str], cluster: Cluster
    ) -> Learned:
        """Read what the sweep's first task and its trials pushed.

        :param cluster: the nodes that take part.
        """
        from saturn_airflow.profiling.crowding import crowded
        from saturn_airflow.profiling.knowledge import Knowledge
        from saturn_airflow.profiling.options import by_key

        use_techniques_folder()
        jobs, known, attempt = (
            pull_from_trials(context, settings.trials_task, key) for key in ("jobs", "known", "attempt")
        )
        measured = pull_all(context, profile_tasks, ESTIMATE_KEY, attempt)
        broken: dict[str, str] = {}
        for entry in measured:
            broken.update(broken_of(entry))
        fresh = [Estimate.from_dict(entry["estimate"]) for entry in measured if "estimate" in entry]
        uses = [
            CoreUse.from_dict(entry["cores"]) if "cores" in entry else None
            for entry in measured
            if "estimate" in entry
        ]
        found = by_key(*map(Estimate.from_dict, known))
        for e in crowded(list(zip(fresh, uses, strict=True)), cluster, len(jobs)):
            found[e.key] = found[e.key].joined(e) if e.key in found else e
        every, memory = list(map(Job.from_dict, jobs)), memory_records.learned()
        knowledge = Knowledge.of(every, cluster, settings.techniques, found.values(), list(broken), memory)
        return cls(knowledge, fresh, broken, len(measured), attempt)


class WaveOperator(ListingOperator):
    """A task that returns the trials of a wave; where there are none, all waves are skipped at once.

    Airflow itself skips one task after another, each by another look of its scheduler, and the plan waits for
    the last. They are skipped once this task has succeeded: a further try of it might list trials.
    """

    def __init__(self, *, settings: SweepSettings, on_success_callback: Any = None, **kwargs: Any) -> None:
        theirs = on_success_callback or []
        theirs = theirs if isinstance(theirs, Sequence) else [theirs]
        super().__init__(on_success_callback=[_skip_waves, *theirs], **kwargs)
        self.settings = settings
        #: Whether the task has listed trials.
        self.lists_trials = True

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """List the trials."""
        trials = self.list_trials(context)
        self.lists_trials = bool(trials)
        return trials

    @abstractmethod
    def list_trials(self, context: Context) -> list[dict[str, Any]]:
        """The trials of the wave."""


def _skip_waves(context: Context) -> None:
    # The task that ran is a copy of the one that this was given to.
    task = context["task"]
    assert isinstance(task, WaveOperator), "no other is given this"
    if task.lists_trials:
        return
    waves = f"{task.settings.group}.profile."
    try:
        skip_tasks(sorted(name for name in task.get_flat_relative_ids() if name.startswith(waves)))
    except Exception as error:  # of Airflow's API; its scheduler skips them, too
        task.log.warning("The waves of trials are not skipped yet: %s", error)


class NextWaveOperator(WaveOperator):
    """Return the next wave: trials of strategies that a plan would use if they were as fast as they could be.

    :param profile_tasks: of all waves before.
    :param last: whether no wave comes after this one.
    """

    def __init__(self, *, profile_tasks: list[str], last: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.profile_tasks = profile_tasks
        self.last = last

    def list_trials(self, context: Context) -> list[dict[str, Any]]:
        """The trials of the next wave; none when the plan would not use them."""
        from saturn_airflow.profiling import waves

        began = time.monotonic()
        every = self.settings.cluster
        cluster = present(every, left_out_now(context, self.settings.trials_task, every))
        learned = Learned.of(context, self.settings, self.profile_tasks, cluster)
        solve = quick_solve(self.settings.planning_seconds)
        wave = waves.next_wave(learned.knowledge, solve, last=self.last)
        self.log.info(
            "%d estimates are known; %d more trials could make the plan shorter (%.1f s to find out)",
            len(learned.knowledge.known),
            len(wave),
            time.monotonic() - began,
        )
        try:
            trials = listed(wave, learned.knowledge, learned.attempt)
        except InvalidSweepError as error:
            raise AirflowFailException(str(error)) from None
        tell_of_trials(SweepContext.of(context, self.settings.group), self.settings, trials, cluster)
        return trials


def listed(wave: Sequence[Key], knowledge: Knowledge, attempt: float) -> list[dict[str, Any]]:
    """The trials of a wave as profile tasks take them, in the order in which they get their devices.

    :raises InvalidSweepError: when they are more than Airflow maps over.
    """
    from saturn_airflow.profiling.trials import trials_of

    trials = trials_of(wave, knowledge.strategies, knowledge.broken)
    check_map_length(len(trials), "trials")
    made = time.time()
    return [
        {**trial.to_dict(), "attempt": attempt, "made": made, "position": position}
        for position, trial in enumerate(trials)
    ]


def quick_solve(time_limit: float) -> Callable[[Problem], Plan]:
    """A planner that is good enough to see which strategies a plan would use.

    It takes no longer than a better plan could save: the sweep waits for it.
    """

    def solve(problem: Problem) -> Plan:
        from saturn_airflow import planning

        seconds = min(_MOST_SECONDS, _SHARE * time_limit)
        return planning.solve(problem, time_limit=seconds, gap=_GAP, all_wait=True)

    return solve


def check_map_length(count: int, what: str) -> None:
    """Check that Airflow will map over ``count`` items.

    :raises InvalidSweepError: when they are more than ``[core] max_map_length``.
    """
    limit = conf.getint("core", "max_map_length", fallback=1024)
    if count > limit:
        raise InvalidSweepError(
            f"the sweep has {count} {what}, more than Airflow maps over ([core] max_map_length = {limit}); "
            "raise the limit, or split the sweep"
        )
