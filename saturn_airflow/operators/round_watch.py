"""Who notices in a round with several nodes that one is gone, or that jobs are better off elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import BaseSensorOperator, Context, TaskInstanceState

from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators.airflow_internals import skip_tasks
from saturn_airflow.operators.context import SweepContext
from saturn_airflow.operators.drains import drained
from saturn_airflow.operators.inventory import has_queues, lost
from saturn_airflow.operators.others import OTHERS_KEY, wins_elsewhere

#: Seconds between looks; each is a process of a few seconds.
LOOK_SECONDS = 20.0
#: A node whose worker is away for less is not lost: training goes on there while its worker is restarted.
AWAY_SECONDS = 60.0
_YEAR = 365 * 86400.0
ENDED = (
    TaskInstanceState.SUCCESS,
    TaskInstanceState.FAILED,
    TaskInstanceState.SKIPPED,
    TaskInstanceState.UPSTREAM_FAILED,
    TaskInstanceState.REMOVED,
)


def over_file(sweep: SweepContext, number: int, attempt: float) -> Path:
    """What ends a round before its time, once it exists.

    :param attempt: when the round's plan was made, in seconds since the epoch.
    """
    return sweep.folder / f"round_{number}_{attempt}.over"


class RoundWatchOperator(BaseSensorOperator):
    """End a round when a node is lost, so that the next one takes its jobs elsewhere.

    Airflow itself gives up a lost node's tasks late: those that ran when it misses their heartbeats, and all
    that then wait in the node's queue half an hour later. This task looks from time to time. Where a node
    has tasks left, none of which runs, and no worker, they are skipped, and the round is over for all. So it
    is where a node is drained; its jobs then leave it with a checkpoint. And so it is, where rounds end by
    ``off_by``, when what waits would be done earlier on other nodes by more than that share of the plan,
    since other sweeps have come, have ended, or take longer.

    :param number: of the round.
    :param plan_task: the round's.
    :param train_tasks: the round's, by node.
    """

    def __init__(
        self,
        *,
        number: int,
        settings: SweepSettings,
        plan_task: str,
        train_tasks: dict[str, str],
        **kwargs: Any,
    ) -> None:
        super().__init__(mode="reschedule", poke_interval=LOOK_SECONDS, timeout=_YEAR, **kwargs)
        self.number = number
        self.settings = settings
        self.plan_task = plan_task
        self.train_tasks = train_tasks

    def poke(self, context: Context) -> bool:
        """Whether all is done: training has ended, or the next round has what a lost node had.

        Where executors have no queues, nothing can be seen.
        """
        if not has_queues():
            return True
        cluster = self.settings.cluster
        ti = context["ti"]
        attempt, entries = (
            ti.xcom_pull(task_ids=self.plan_task, key=key, map_indexes=-1)
            for key in ("attempt", "return_value")
        )
        if attempt is None or entries is None:
            # The plan was cleared alone, and is just handed on again, one part after another.
            found = ti.get_task_states(dag_id=ti.dag_id, task_ids=[self.plan_task], run_ids=[ti.run_id])
            return found.get(ti.run_id, {}).get(self.plan_task) in ENDED
        left = self._left(context, entries)
        # A worker that was restarted finds its tasks again for as long as Airflow counts them as running.
        idle = [n for n in cluster if left[n.name] and TaskInstanceState.RUNNING not in left[n.name].values()]
        if gone := lost(cluster, idle, AWAY_SECONDS):
            names = ", ".join(node.name for node in gone)
            self.log.error(
                "No worker listens for %s any more: its jobs go on elsewhere, in the next round", names
            )
            _touch(over_file(SweepContext.of(context, self.settings.group), self.number, attempt))
            skip_tasks([(self.train_tasks[n.name], index) for n in gone for index in left[n.name]])
            return True
        self._end_for_drained(context, cluster, attempt, left)
        if any(left.values()):
            self._end_for_others(context, attempt)
        return not any(left.values())

    def _end_for_drained(
        self, context: Context, cluster: Cluster, attempt: float, left: Mapping[str, Mapping[int, Any]]
    ) -> None:
        """End the round for all where a node that has jobs left is drained, and another is not."""
        leaving = [node.name for node in cluster if node.name in drained()]
        over = over_file(SweepContext.of(context, self.settings.group), self.number, attempt)
        if not any(left[name] for name in leaving) or len(leaving) == len(cluster) or over.exists():
            return
        self.log.warning("%s: drained; the round is over, and the next plan does without", ", ".join(leaving))
        _touch(over)

    def _end_for_others(self, context: Context, attempt: float) -> None:
        """End the round for all where what waits is better elsewhere, since others have come or ended."""
        least = self.settings.rounds.off_by
        sweep = SweepContext.of(context, self.settings.group)
        over = over_file(sweep, self.number, attempt)
        if least is None or self.number >= self.settings.rounds.most or over.exists():
            return
        entries, before = (
            context["ti"].xcom_pull(task_ids=self.plan_task, key=key, map_indexes=-1) or []
            for key in ("return_value", OTHERS_KEY)
        )
        won = wins_elsewhere(sweep, [PlanEntry.from_dict(entry) for entry in entries], before)
        if won > least:
            self.log.info(
                "On other nodes what waits would end earlier by %.0f%%: the round is over", 100 * won
            )
            _touch(over)

    def _left(
        self, context: Context, entries: Sequence[Mapping[str, Any]]
    ) -> dict[str, dict[int, str | None]]:
        """By node, the states of its train tasks that have not ended.

        :param entries: of the round's plan.
        """
        ti = context["ti"]
        found = ti.get_task_states(
            dag_id=ti.dag_id, task_ids=list(self.train_tasks.values()), run_ids=[ti.run_id]
        )
        states = found.get(ti.run_id, {})
        left: dict[str, dict[int, str | None]] = {}
        for node, task in self.train_tasks.items():
            count = sum(entry["node"] == node for entry in entries)
            # A task that could not be mapped has a state of its own; those not mapped yet will soon run.
            known = (
                {} if states.get(task) in ENDED else dict.fromkeys(range(count), TaskInstanceState.RUNNING)
            )
            known = {index: states.get(f"{task}_{index}", state) for index, state in known.items()}
            left[node] = {index: state for index, state in known.items() if state not in ENDED}
        return left


def _touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
