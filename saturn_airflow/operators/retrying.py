"""How often, and how soon, the tasks of a sweep are tried again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Context, ExceptionRetryPolicy, RetryAction, RetryDecision, RetryRule
from airflow.sdk.exceptions import AirflowException

from saturn_airflow.model import disks
from saturn_airflow.model.errors import DiskError
from saturn_airflow.model.status import Status

#: Tries that a short task has for what is not its fault, such as a worker that was restarted: with growing
#: delays they last through half an hour without an API server.
_TRIES_FOR_AIRFLOW = 10
#: The same of a task that trains: each outage takes some, and Airflow gives none back.
TRIES_OF_A_TRAINING = 1000
#: Seconds until the next try of a training that ended without a word of its task's.
_UNTOLD_SECONDS = 1.0
#: Seconds before the first further try, and the most, by how training ended; each further end of the same
#: kind doubles them. Data that can't be reached for a moment is the commonest failure of a job's own code.
_FIRST_SECONDS = {Status.LOST: 1.0, Status.STOPPED: 1.0, Status.OUT_OF_MEMORY: 60.0}
_FIRST_SECONDS_OF_FAILURES, _MOST_SECONDS = 5.0, 300.0
#: Seconds between the tries of a training that a full disk keeps from beginning: the tries last for a night.
_DISK_SECONDS = 60.0
#: What Airflow's log says of such a try.
DISK_REASON = "a disk is full, fails or can't be written, which may be mended"


class TryAgainError(AirflowException):
    """The task ends, and another try of it is to go on, or to begin again.

    :param seconds: until then.
    """

    def __init__(self, message: str, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class WhenItSaysSo(ExceptionRetryPolicy):
    """Tries again after a :class:`TryAgainError`, when that says so; after other errors by rules."""

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Whether and when to try again."""
        # Without a file it is another computer that refuses.
        denied = isinstance(exception, PermissionError) and bool(exception.filename)
        if isinstance(exception, OSError) and (denied or disks.is_fault(exception)):
            exception = DiskError(str(exception))
        if isinstance(exception, TryAgainError):
            return RetryDecision.retry(timedelta(seconds=exception.seconds), "the task says so")
        if _was_told_to_go_before_it_began(exception):
            return RetryDecision.retry(timedelta(seconds=_UNTOLD_SECONDS), "it had not begun")
        found = super().evaluate(exception, try_number, max_tries, context)
        if found.action == RetryAction.FAIL and max_tries - try_number >= TRIES_OF_A_TRAINING:
            # No run counts it, such as a callback's sys.exit: as often as the job's own tries allow.
            delay = timedelta(seconds=_FIRST_SECONDS_OF_FAILURES)
            return RetryDecision.retry(delay, "training can go on, whatever failed beside it")
        return found


def _was_told_to_go_before_it_began(exception: BaseException) -> bool:
    """Whether this is what Airflow's handler of SIGTERM raises in a mapped task that is not made yet.

    The handler calls ``on_kill`` of what is still the mapping of all such tasks, which has none. So a task
    ends that starts while the API server is away.
    """
    return isinstance(exception, AttributeError) and exception.name == "on_kill"


_AIRFLOW = RetryRule(
    exception=["airflow.sdk.exceptions.AirflowRuntimeError", "builtins.OSError"],
    reason="Airflow could not be asked",
    retry_delay=timedelta(seconds=3),
)
_DISK_MAY_BE_MENDED = RetryRule(exception="saturn_airflow.model.errors.DiskError", reason=DISK_REASON)
#: For tasks that need no device, or measure: Airflow's errors and full disks; what else goes wrong is their
#: fault.
SHORT_TASK_POLICY = WhenItSaysSo(rules=[_DISK_MAY_BE_MENDED, _AIRFLOW], default=RetryAction.FAIL)
#: For tasks that train: Airflow's own errors in following it, too; what else goes wrong as often as the job's
#: own tries allow.
TRAINING_POLICY = WhenItSaysSo(
    rules=[
        replace(_DISK_MAY_BE_MENDED, retry_delay=timedelta(seconds=_DISK_SECONDS)),
        _AIRFLOW,
        RetryRule(exception="airflow.sdk.exceptions.AirflowException", reason="training can go on"),
    ],
    default=RetryAction.FAIL,
)


def short_task_retries() -> dict[str, Any]:
    """Airflow's arguments that say how often and when a task is tried again that does not train."""
    return {
        "retries": _TRIES_FOR_AIRFLOW,
        "retry_delay": timedelta(seconds=5),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=5),
    }


def training_retries(own_tries: int) -> dict[str, Any]:
    """Airflow's arguments that say how often and when a task is tried again that trains.

    Airflow knows one number of tries for all that may happen in days, and delays that grow with that number.
    So the number is large and the delay is short; what counts against a job is counted by its runs.

    :param own_tries: those that the job has for failures of its own.
    """
    return {
        "retry_policy": TRAINING_POLICY,
        "retries": own_tries + TRIES_OF_A_TRAINING,
        "retry_delay": timedelta(seconds=_UNTOLD_SECONDS),
    }


def cleared_after(max_tries: int, retries: int) -> int:
    """The last try of a task that trains before somebody cleared it; 0 where nobody did.

    Who clears a task gives it all its tries again, on top of those it had.

    :param retries: those that the task has in this version.
    """
    if max_tries < retries >= TRIES_OF_A_TRAINING:
        # An earlier version gave it fewer.
        retries += _TRIES_FOR_AIRFLOW - TRIES_OF_A_TRAINING
    return max(0, max_tries - retries)


def seconds_until_next_try(folder: Path, status: str) -> float:
    """Seconds to wait before a job's training is tried again that ended with ``status``.

    It grows with ends of the same kind, one after another, that brought no checkpoint.

    :param folder: the state of the job in its sweep.
    """
    from saturn_airflow.launch import runs

    in_a_row = 0
    for run in reversed(runs.all_of(folder)):
        end = run.end
        if end is None or end["status"] != status:
            break
        in_a_row += 1
        if run.has_saved():
            break
    first = _FIRST_SECONDS.get(Status(status), _FIRST_SECONDS_OF_FAILURES)
    return min(_MOST_SECONDS, first * 2.0 ** min(max(in_a_row - 1, 0), 10))
