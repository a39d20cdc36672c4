"""What the user wants of one DAG run: its conf says it under ``saturn``.

``{"saturn": {"from_scratch": ["job-a"], "go_on": true}}``, of jobs that are cleared: true for all, or the
names of some. ``{"saturn": {"register": true}}``: a backfill registers its best model, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from airflow.sdk import Context

from saturn_airflow.launch.restarting import FROM_SCRATCH, GO_ON, Wish
from saturn_airflow.model.errors import InvalidSweepError

KEY = "saturn"
REGISTER = "register"
REGISTER_EXAMPLE = '{"saturn": {"register": true}}'
_HOW = 'give it such as {"saturn": {"from_scratch": ["job-a"], "go_on": true}}'


def wish(conf: Mapping[str, Any] | None, job: str) -> Wish | None:
    """What a DAG run's conf wants of ``job`` where it is cleared.

    :raises InvalidSweepError: when the conf says it in a way that can't be read.
    """
    return next((name for name, jobs in _wishes(conf).items() if jobs is True or job in jobs), None)


def check(conf: Mapping[str, Any] | None, jobs: Collection[str]) -> None:
    """Check a DAG run's conf.

    :raises InvalidSweepError: for what can't be read, and jobs that are not in the sweep.
    """
    for name, wanted in _wishes(conf).items():
        if wanted is not True and (unknown := [job for job in wanted if job not in jobs]):
            raise InvalidSweepError(
                f"the DAG run's conf: {KEY}.{name} names {unknown[0]!r}, which is no job of this sweep; its "
                f"jobs are {', '.join(sorted(jobs))}"
            )


def registers(context: Context) -> bool:
    """Whether the task's DAG run may register a model: a backfill only where that was asked for.

    Its runs are of days gone by, and several at once.
    """
    run = context.get("dag_run")
    given = (conf_of(context) or {}).get(KEY)
    asked = isinstance(given, Mapping) and given.get(REGISTER) is True
    return asked or str(getattr(run, "run_type", "")).rpartition(".")[2].lower() != "backfill"


def conf_of(context: Context) -> Mapping[str, Any] | None:
    """The conf of the task's DAG run."""
    run = context.get("dag_run")
    return None if run is None else run.conf


def _wishes(conf: Mapping[str, Any] | None) -> dict[Wish, Any]:
    given = (conf or {}).get(KEY, {})
    if not isinstance(given, Mapping):
        raise InvalidSweepError(f"the DAG run's conf: {KEY} is {given!r:.80}; {_HOW}")
    known: tuple[Wish, ...] = (FROM_SCRATCH, GO_ON)
    if unknown := [key for key in given if key not in (*known, REGISTER)]:
        raise InvalidSweepError(
            f"the DAG run's conf: there is no {KEY}.{unknown[0]}; known are {', '.join(known)} "
            f"and {REGISTER}; {_HOW}"
        )
    if given.get(REGISTER, False) not in (True, False):
        raise InvalidSweepError(
            f"the DAG run's conf: {KEY}.{REGISTER} is {given[REGISTER]!r:.80}; it is true or false"
        )
    wishes = {name: _jobs_of(name, given[name]) for name in known if given.get(name, False) is not False}
    # A job that is named gets what is said of it by name, whatever is said of all: so that comes first.
    wishes = dict(sorted(wishes.items(), key=lambda item: item[1] is True))
    both = [wishes[name] for name in wishes]
    if len(both) == 2 and (both == [True, True] or (True not in both and set(both[0]) & set(both[1]))):
        what = "all jobs" if both[0] is True else repr(min(set(both[0]) & set(both[1])))
        raise InvalidSweepError(f"the DAG run's conf: {KEY} wants {' and '.join(known)} of {what}; say one")
    return wishes


def _jobs_of(name: str, value: Any) -> Any:
    if value is True or (isinstance(value, list) and all(isinstance(job, str) for job in value)):
        return value
    raise InvalidSweepError(f"the DAG run's conf: {KEY}.{name} is {value!r:.80}; {_HOW}")
