"""What an Airflow task does that follows a run on its node: notice that it must go, and learn why."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from airflow.sdk import BaseOperator, TaskInstanceState

#: States in which Airflow still wants a task's work, though perhaps not from this process: another try comes.
STILL_WANTED = (
    TaskInstanceState.RUNNING,
    TaskInstanceState.QUEUED,
    TaskInstanceState.SCHEDULED,
    TaskInstanceState.UP_FOR_RETRY,
    TaskInstanceState.UP_FOR_RESCHEDULE,
    TaskInstanceState.DEFERRED,
    None,
)
#: Airflow kills a task five seconds after it told it to go. Asking may take so much of them: it is what
#: decides, and training needs no task to stop.
ASKING_SECONDS = 4.0


class FollowingOperator(BaseOperator):
    """A task that follows a run, and must not wait when it is told to go.

    Airflow calls ``on_kill`` whatever the reason: the user cleared the task, its worker is shut down, or the
    API server did not answer. So nothing is decided there.
    """

    _told_to_go = False
    _parent = 0

    def on_kill(self) -> None:
        """Note it; who follows looks at :meth:`must_go`."""
        self._told_to_go = True

    def must_go(self) -> bool:
        """Whether this process was told to go, or Airflow's process above it is gone.

        A killed worker takes that process with it, but not this one, which nobody hears any more.
        """
        self._parent = self._parent or os.getppid()
        return self._told_to_go or self.is_orphan()

    def is_wanted(self, ti: Any) -> bool:
        """Whether Airflow still wants the work of this task; True where it can't be asked.

        Airflow does not when the task was cleared or marked as ended, and when its DAG run was deleted.
        """
        if self.is_orphan():
            return True
        answers: list[bool] = []

        def ask() -> None:
            index = ti.map_index if ti.map_index is not None and ti.map_index >= 0 else None
            found = ti.get_task_states(
                dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=index
            )
            states = list(found.get(ti.run_id, {}).values())
            answers.append(bool(states) and states[0] in STILL_WANTED)

        # In a thread of its own, since an API server that is away is asked for much longer.
        asking = threading.Thread(target=_quietly, args=(ask,), daemon=True)
        asking.start()
        asking.join(ASKING_SECONDS)
        return answers[0] if answers else True

    def is_orphan(self) -> bool:
        """Whether Airflow's process above this one is gone."""
        return bool(self._parent) and os.getppid() != self._parent


def go_with_parent() -> None:
    """From now on, end this process as Airflow would when Airflow's process above it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="saturn-parent", daemon=True).start()


def _quietly(ask: Any) -> None:
    try:
        ask()
    except Exception:  # whatever went wrong, there is no answer
        return
