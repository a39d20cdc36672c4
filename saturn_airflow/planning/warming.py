"""Getting ready what planning needs, while the time is used for what does without it.

Planning imports two thousand modules, Pyomo's most of them: a second of one core. Processes that tasks are
forked from do that once (:func:`import_all`). Compiled code is read from disk in a fraction of a second. On a
machine that never planned before, all of it is compiled first, which takes some ten seconds of a core that
nobody else uses. :func:`warm` does that ahead, and :func:`finish_aside` after a plan that had no time for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.problem import Option, PlannedJob, Problem
from saturn_airflow.planning.clock import Clock, LookClock
from saturn_airflow.planning.compiled import is_kept
from saturn_airflow.planning.exact_search import sharings
from saturn_airflow.planning.heuristics import annealing
from saturn_airflow.planning.heuristics.ejection_pool import PoolSearch
from saturn_airflow.planning.heuristics.list_scheduling import list_schedule
from saturn_airflow.planning.instances.instance import group

_LOOK_EVERY = 0.2  # seconds between two looks at the clock while waiting
_ready = threading.Event()
_missed = threading.Event()
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
            _missed.set()
            return False
    return True


def finish_aside() -> None:
    """Have a process that outlives this one compile what this one began to, where it had no time for it.

    On a slow or busy machine compiling can take longer than any plan may: what is not done by then is lost
    with the process, so that no plan would ever have it. Does nothing where nothing is left to compile, or
    what is compiled can't be kept.
    """
    if _ready.is_set() or _failed or not _missed.is_set() or not is_kept():
        return
    # By a shell that ends at once: the process is nobody's child, and no task waits for it or ends it.
    aside = [sys.executable, "-c", "from saturn_airflow.planning.warming import warm_once; warm_once()"]
    with contextlib.suppress(OSError):
        subprocess.run(
            ["sh", "-c", 'nice -n 10 "$@" &', "sh", *aside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=child_environment(),
            check=False,
        )


def child_environment() -> dict[str, str]:
    """The environment of processes that import from where this one does, whoever put that on its path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def warm_once() -> None:
    """Run all compiled code once, unless another process of this machine does so just now."""
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        warm()
