"""Getting ready what planning needs, while the time is used for what does without it.

Planning imports two thousand modules, Pyomo's most of them: a second of one core. Processes that tasks are
forked from do that once (:func:`import_all`). Compiled code is read from disk in a fraction of a second. On a
machine that never planned before, all of it is compiled first, which takes some ten seconds. :func:`warm`
does that ahead.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import threading

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.clock import Clock, LookClock
from saturn_airflow.planning.exact_search import sharings
from saturn_airflow.planning.heuristics import annealing
from saturn_airflow.planning.heuristics.ejection_pool import PoolSearch
from saturn_airflow.planning.heuristics.list_scheduling import list_schedule
from saturn_airflow.planning.instances.instance import group

_LOOK_EVERY = 0.2  # seconds between two looks at the clock while waiting
_ready = threading.Event()
_failed: list[BaseException] = []
_started = threading.Lock()


def import_all() -> None:
    """Import what planning imports where it first needs it.

    Nothing runs and no thread starts: what is forked afterwards can plan.
    """
    for name in ("scipy.linalg.cython_blas", "saturn_airflow.planning.highs", "highspy"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def warm() -> None:
    """Run all compiled code once."""
    jobs = tuple(PlannedJob(f"job{n}", (Option("t", 1, {"cpu": 1.0}),)) for n in range(3))
    instance = group(Problem("warming", (Node("a", 1, "cpu"), Node("b", 1, "cpu")), jobs))
    schedule = list_schedule(instance, 1.0, Clock(1))
    rng, blink = random.Random(0), Clock(1e-4)
    annealing.anneal(instance, schedule, annealing.makespan_energy(2.0), rng, blink, hot=1.0, cold=0.1)
    sharings.schedule_by(instance, 2.0, Clock(60))
    PoolSearch(instance, schedule, 1.5, rng, 1).run(Clock(1e-3))
    _ready.set()


def start() -> None:
    """Begin to compile in a thread of its own, unless that was done."""
    if not _ready.is_set() and _started.acquire(blocking=False):
        # numba imports scipy where it is installed; and parts of scipy import each other, so that two threads
        # that import them at once can deadlock.
        with contextlib.suppress(ImportError):
            import scipy.linalg.cython_blas  # noqa: F401
        threading.Thread(target=_warm_aside, daemon=True).start()


def _warm_aside() -> None:
    try:
        warm()
    except BaseException as error:
        _failed.append(error)
        raise


def wait(clock: Clock) -> bool:
    """Whether the compiled code got ready before the time was up.

    :raises RuntimeError: when it can't be compiled and the clock would wait for it for ever.
    """
    start()
    while not _ready.wait(_LOOK_EVERY):
        if _failed and isinstance(clock, LookClock):
            raise RuntimeError("the planner's code could not be compiled") from _failed[0]
        if not isinstance(clock, LookClock) and clock.expired:
            return False
    return True
