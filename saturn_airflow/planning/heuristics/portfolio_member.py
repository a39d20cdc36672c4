"""One of the processes of a :mod:`portfolio`: ``python -m`` with this module, run by the one that leads."""

from __future__ import annotations

import contextlib
import pickle
import queue
import sys
import threading

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.heuristics.portfolio import News, SearchTask, listen, send
from saturn_airflow.planning.heuristics.search import Searcher
from saturn_airflow.planning.incumbent import Incumbent
from saturn_airflow.planning.instances.instance import group


def main() -> None:
    """Wait for a schedule, search from it, tell what is better, until the leader has heard enough."""
    task: SearchTask = pickle.load(sys.stdin.buffer)
    heard: queue.Queue[News] = queue.Queue()
    threading.Thread(target=listen, args=(sys.stdin.buffer, heard), daemon=True).start()
    best = Incumbent(group(task.problem), task.objective, Clock(task.seconds), task.enough)
    # What the leader knows.
    version, bound = -1, 0.0

    def exchange() -> None:
        nonlocal version, bound
        while not heard.empty() or not best.schedule:
            news = heard.get(timeout=max(0.01, best.clock.left))
            if best.offer(news.schedule):
                version = best.version
            best.raise_bound(news.bound)
            bound = max(bound, news.bound)
        if best.version != version or best.bound > bound:
            version, bound = best.version, best.bound
            send(sys.stdout.buffer, News(best.schedule, best.bound))

    with contextlib.suppress(queue.Empty, OSError):
        exchange()
        Searcher(best, task.seed, exchange, exactly=task.exactly).run(best.clock)
        exchange()


if __name__ == "__main__":
    main()
