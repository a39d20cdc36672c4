"""A member of the team (see :mod:`team`): ``python -m saturn_airflow.planning.member``, run by the leader."""

from __future__ import annotations

import contextlib
import pickle
import queue
import sys
import threading

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.incumbent import Incumbent
from saturn_airflow.planning.instance import group
from saturn_airflow.planning.search import Searcher
from saturn_airflow.planning.team import News, Task, listen, send


def main() -> None:
    """Wait for a schedule, search from it, tell what is better, until the leader has heard enough."""
    task: Task = pickle.load(sys.stdin.buffer)
    heard: queue.Queue[News] = queue.Queue()
    threading.Thread(target=listen, args=(sys.stdin.buffer, heard), daemon=True).start()
    best = Incumbent(group(task.problem), task.objective, Clock(task.seconds), task.enough)
    known = -1

    def exchange() -> None:
        nonlocal known
        while not heard.empty() or not best.schedule:
            news = heard.get(timeout=max(0.01, best.clock.left))
            if best.offer(news.schedule):
                known = best.version
            best.raise_bound(news.bound)
        if best.version != known:
            known = best.version
            send(sys.stdout.buffer, News(best.schedule, best.bound))

    with contextlib.suppress(queue.Empty, OSError):
        exchange()
        Searcher(best, task.seed, exchange).run(best.clock)
        exchange()


if __name__ == "__main__":
    main()
