"""One of the processes of a :mod:`portfolio`: ``python -m`` with this module, run by the one that leads."""

from __future__ import annotations

import contextlib
import pickle
import queue
import sys
import threading

from saturn_airflow.planning.clock import Clock
from saturn_airflow.planning.heuristics.portfolio import SearchTask, SharedBest, listen, send
from saturn_airflow.planning.heuristics.search import Searcher
from saturn_airflow.planning.incumbent import Incumbent
from saturn_airflow.planning.instances.instance import group


def main() -> None:
    """Wait for a schedule and search from it, sending what is better, until the time is up."""
    task: SearchTask = pickle.load(sys.stdin.buffer)
    received: queue.Queue[SharedBest] = queue.Queue()
    threading.Thread(target=listen, args=(sys.stdin.buffer, received), daemon=True).start()
    best = Incumbent(group(task.problem), task.objective, Clock(task.seconds), task.enough)
    # What the leader knows.
    version, bound = -1, 0.0

    def exchange() -> None:
        nonlocal version, bound
        # Without a schedule there is nothing to search from: wait for the leader's first.
        while not received.empty() or not best.schedule:
            news = received.get(timeout=max(0.01, best.clock.left))
            if best.offer(news.schedule):
                version = best.version
            best.raise_bound(news.bound)
            bound = max(bound, news.bound)
        if best.version != version or best.bound > bound:
            version, bound = best.version, best.bound
            send(sys.stdout.buffer, SharedBest(best.schedule, best.bound))

    with contextlib.suppress(queue.Empty, OSError):
        exchange()
        Searcher(best, task.seed, exchange, exactly=task.exactly).run(best.clock)
        exchange()


if __name__ == "__main__":
    main()
