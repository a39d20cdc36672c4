"""More processes that search with seeds of their own, and share what they find.

They are plain subprocesses that talk over pipes, so that a solve works anywhere: under Airflow, whose tasks
may not fork, and in scripts without a ``__main__`` guard. Nothing is lost when one dies.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import subprocess
import sys
import threading
from typing import IO, Any, NamedTuple

from saturn_airflow.model.problem import Problem
from saturn_airflow.planning.incumbent import Incumbent
from saturn_airflow.planning.instances.schedule import Schedule
from saturn_airflow.planning.objectives import PlanObjective
from saturn_airflow.planning.warming import child_environment


class SearchTask(NamedTuple):
    """What a member is to do.

    :param seconds: to search for.
    :param enough: the gap at which to stop, as a share.
    :param exactly: whether to prove as well as to search.
    """

    problem: Problem
    objective: PlanObjective
    seconds: float
    enough: float
    seed: int
    exactly: bool


class SharedBest(NamedTuple):
    """The best schedule and bound of one process."""

    schedule: Schedule
    bound: float


class Portfolio:
    """The processes (members) of a solve, seen from the one that leads it.

    A context manager: at its end they are killed.

    :param size: how many beside the leader.
    :param exactly: whether the first of them proves as well as searches.
    """

    def __init__(self, best: Incumbent, size: int, seed: int, *, exactly: bool = False) -> None:
        self.best = best
        self.sent: tuple[int, float] = (-1, -1.0)
        self.received: queue.Queue[SharedBest] = queue.Queue()
        self.members: list[subprocess.Popen[bytes]] = []
        environment = child_environment()
        for number in range(size):
            with contextlib.suppress(OSError):
                self._start(
                    SearchTask(
                        best.instance.problem,
                        best.objective,
                        best.clock.left,
                        best.enough,
                        seed + 1 + number,
                        exactly and number == 0,
                    ),
                    environment,
                )

    def __enter__(self) -> Portfolio:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
        for member in self.members:
            member.wait()
            for pipe in (member.stdin, member.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()

    def exchange(self) -> None:
        """Take what members found, and tell them the best."""
        while not self.received.empty():
            news = self.received.get()
            self.best.offer(news.schedule)
            self.best.raise_bound(news.bound)
        state = (self.best.version, self.best.bound)
        if state == self.sent or not self.best.schedule:
            return
        self.sent = state
        for member in list(self.members):
            assert member.stdin is not None
            try:
                send(member.stdin, SharedBest(self.best.schedule, self.best.bound))
            except OSError:
                self.members.remove(member)

    def _start(self, task: SearchTask, environment: dict[str, str]) -> None:
        member = subprocess.Popen(
            [sys.executable, "-m", "saturn_airflow.planning.heuristics.portfolio_member"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        # Before it is spoken to: where that fails, it is still killed at the end.
        self.members.append(member)
        assert member.stdin is not None
        assert member.stdout is not None
        send(member.stdin, task)
        threading.Thread(target=listen, args=(member.stdout, self.received), daemon=True).start()


def send(pipe: IO[bytes], message: Any) -> None:
    """Write ``message`` for the process at the other end."""
    pickle.dump(message, pipe)
    pipe.flush()


def listen(pipe: IO[bytes], received: queue.Queue[SharedBest]) -> None:
    """Put what comes through ``pipe`` into ``received``, until its other end is gone."""
    with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
        while True:
            received.put(pickle.load(pipe))
