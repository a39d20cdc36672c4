"""Deadlines among several sweeps: who breaks one is told so, and whose is broken."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow.sdk import Context

from saturn_airflow.model import references
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.model.sharing import SharedCluster
from saturn_airflow.operators.context import SweepContext, finite, home, sharing_rules
from saturn_airflow.operators.shared_clock import PlansClock

if TYPE_CHECKING:
    from saturn_airflow.sharing.broken_deadlines import LateDeadline

log = logging.getLogger(__name__)

#: What a train task tells the page of the sweep's deadline, once it has found it broken.
LATE_KEY = "late"
#: Seconds between two looks of all train tasks of a sweep together, where no sweep came or ended; and between
#: two looks of one task whether any did.
_LOOK_SECONDS, _CHECK_SECONDS = 60.0, 5.0
#: For how long a task that ends waits for a look that goes on.
_CLOSING_SECONDS = 10.0
#: Where it is nobody's doing, a deadline counts as missed from this share of the time to it on: estimates are
#: a few per cent off.
_OWN_SHARE = 0.05


def tell_author(function: str | None, context: Context, deadline: Mapping[str, Any]) -> None:
    """Call the author's ``on_missed_deadline``; what goes wrong there is logged, and costs no sweep.

    :param function: as ``"module:name"``; None where there is none.
    :param deadline: ``at`` (seconds since the epoch), ``planned``; on the way ``expected`` (when all is
        done), at the end ``met`` and ``late_seconds``.
    """
    if function is None:
        return
    try:
        references.resolve(function)(context, dict(deadline))
    except (Exception, SystemExit):
        log.exception("on_missed_deadline %s failed; the sweep goes on", function)


class BrokenDeadlines(NamedTuple):
    """What a sweep has to do with deadlines that are expected to be missed.

    :param own: its own.
    :param others: those that would be kept without it.
    """

    own: LateDeadline | None
    others: list[LateDeadline]


def broken_now(key: str, ahead: float = 0.0) -> BrokenDeadlines:
    """What is expected now of deadlines that concern the sweep of ``key``.

    :param ahead: seconds by which this machine's clock is ahead of that of who planned.
    """
    from saturn_airflow.launch.ledger import Ledger

    ledger = Ledger(home())
    return broken_in(ledger.cluster(ledger.sweeps(), now=time.time() - ahead), key)


def broken_in(cluster: SharedCluster, key: str) -> BrokenDeadlines:
    """What is expected in ``cluster``."""
    from saturn_airflow.sharing.broken_deadlines import late
    from saturn_airflow.sharing.forecast import plan_together

    names = {sweep.name for sweep in cluster.sweeps if sweep.deadline is not None}
    if not names:
        return BrokenDeadlines(None, [])
    try:
        ends = plan_together(cluster, sharing_rules()).sweeps
        own = late(cluster, sharing_rules(), ends, of={key})
        others = late(cluster, sharing_rules(), ends, of=names - {key}, suspects={key})
    except AssertionError:
        log.exception("Nobody knows which deadlines are kept, for a mistake of Saturn's: please report it")
        return BrokenDeadlines(None, [])
    return BrokenDeadlines(next(iter(own), None), [one for one in others if one.without])


def say_what_breaks(
    context: Context, sweep: SweepContext, settings: SweepSettings, attempt: float, planned: bool
) -> dict[str, Any]:
    """Say in the log of its plan which deadlines ``sweep`` breaks, and whether others break its own.

    Names of other sweeps are not said: who may read this log may not know of them.

    :param attempt: when the plan was made, in seconds since the epoch.
    :param planned: whether the plan keeps the deadline; where it does not, that was told.
    :returns: for the pages, where there is anything to tell: ``breaks`` (each with ``at``, ``expected`` and
        ``without``, in seconds since the epoch) and ``expected_late`` (when the sweep itself is done, if
        others break its deadline).
    """
    own, others = broken_now(sweep.key)
    found: dict[str, Any] = {}
    for one in others:
        log.error(
            "THIS SWEEP BREAKS A DEADLINE of another one: due at %s, that is expected to be done at %s "
            "beside this one, and at %s without it; `saturn why` names it",
            *(_at(moment) for moment in (one.deadline, one.end, one.without[sweep.key])),
        )
    if others:
        found["breaks"] = [
            {"at": one.deadline, "expected": one.end, "without": one.without[sweep.key]} for one in others
        ]
    if own is not None and own.without and planned:
        found["expected_late"] = own.end
        _tell_once(context, sweep, own, settings.on_missed_deadline, attempt)
    return found


def in_words(late: LateDeadline) -> str:
    """That a deadline is expected to be missed, without names of others."""
    if late.without:
        whose = f"without another sweep it would be {_at(min(late.without.values()))}; `saturn why` names it"
    else:
        whose = "that is no other sweep's doing alone"
    return (
        f"THE DEADLINE IS EXPECTED TO BE MISSED: due at {_at(late.deadline)}, all is expected to be done at "
        f"{_at(late.end)}; {whose}"
    )


class DeadlineWatch:
    """What a train task does for its sweep's deadline while it follows its job: forecast it, and tell once.

    A forecast is made when a sweep was planned or has ended, and from time to time; by one of the sweep's
    tasks for all, which know of it by a file in its folder.

    :param attempt: when the plan was made, in seconds since the epoch.
    :param function: the author's ``on_missed_deadline``.
    """

    def __init__(
        self,
        context: Context,
        sweep: SweepContext,
        attempt: float,
        function: str | None,
        clock: PlansClock | None = None,
    ) -> None:
        self._clock = PlansClock() if clock is None else clock
        self._context, self._sweep, self._attempt, self._function = context, sweep, attempt, function
        self._ledger = home() / "sweeps" / ".active"
        self._looked = sweep.folder / f"deadline_{attempt}.looked"
        self._checked_at = time.monotonic()
        self._looking: threading.Thread | None = None

    def look(self) -> None:
        """Forecast, in a thread, if it is time to; called all the time."""
        if time.monotonic() - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = time.monotonic()
        if (self._looking is not None and self._looking.is_alive()) or not self._is_time():
            return
        with suppress(OSError):
            self._looked.touch()
            self._looking = threading.Thread(target=self._look, name="saturn-deadline", daemon=True)
            self._looking.start()

    def close(self) -> None:
        """Let a look end that goes on."""
        if self._looking is not None:
            self._looking.join(_CLOSING_SECONDS)

    def _is_time(self) -> bool:
        looked = _changed_at(self._looked)
        # Nodes' clocks may differ, and one that was set back must not end all looks.
        return abs(time.time() - looked) >= _LOOK_SECONDS or _changed_at(self._ledger) > looked

    def _look(self) -> None:
        try:
            own = broken_now(self._sweep.key, self._clock.ahead()).own
            told = _told_file(self._sweep, self._attempt)
            if (
                own is not None
                and not own.without
                and own.end - own.deadline < _OWN_SHARE * (own.deadline - self._attempt)
            ):
                own = None
            if own is None and not told.exists():
                return
            expected, by_others = (own.end, bool(own.without)) if own else (None, False)
            word = {"time": time.time() - self._clock.ahead(), "expected": expected, "by_others": by_others}
            self._context["ti"].xcom_push(LATE_KEY, finite(word))
            if own is not None:
                _tell_once(self._context, self._sweep, own, self._function, self._attempt)
        except Exception:  # training goes on without this look, and the next one says more
            log.exception("The look at the sweep's deadline failed")


def _told_file(sweep: SweepContext, attempt: float) -> Path:
    """What is there once it was told that others break the deadline."""
    return sweep.folder / f"deadline_{attempt}.told"


def _tell_once(
    context: Context, sweep: SweepContext, own: LateDeadline, function: str | None, attempt: float
) -> None:
    """Tell the author, whichever of the sweep's tasks finds it first."""
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(_told_file(sweep, attempt), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    except OSError:
        log.exception("Nobody else knows that this is told")
    log.error("%s", in_words(own))
    due = {"at": own.deadline, "planned": True, "expected": own.end}
    tell_author(function, context, finite(due))


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _at(moment: float) -> str:
    """A moment as people read it; never, where it is infinite."""
    if moment == float("inf"):
        return "no time"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
