"""One run per key, whoever asks first and however many ask at once.

MLflow gives runs random ids and has no unique tags, but a run's parameter can be set only once. So a run
counts when its *claim* parameter has been set to the value all who ask agree on. Whoever adds a run first
marks every other unclaimed run of the key as a duplicate, then claims its own. Of two that do this at once
at least one sees the other's run, and both can't claim: the first to set the parameter of a run decides it.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from saturn_airflow.tracking import server
from saturn_airflow.tracking.server import MlflowAwayError, RecordRefusedError, RunGoneError

if TYPE_CHECKING:
    from mlflow.entities import Run

KEY_TAG = "saturn.key"
_CREATOR_TAG = "saturn.creator"
_DUPLICATE = "(duplicate)"
#: How often at most.
_ATTEMPTS = 20
#: Attempts in which the run with the smaller id goes first; after these, whoever comes first.
_GIVE_WAY = 2


def key_of_job(sweep: str, job: str, training: int) -> str:
    """The key of a job's run.

    :param sweep: its sweep's key.
    :param training: which of the job's trainings, from 1: one that starts anew has a run of its own.
    """
    return f"{sweep}\n{job}" + (f"\n{training}" if training > 1 else "")


def find(uri: str, experiment_id: str, key: str, claim: tuple[str, str]) -> Run | None:
    """The run of ``key``, or None.

    :raises MlflowAwayError: when MLflow does not answer.
    """
    return next((run for run in _runs_of(uri, experiment_id, key) if _claimed(run, claim)), None)


def find_or_create(
    uri: str,
    experiment_id: str,
    key: str,
    claim: tuple[str, str],
    name: str,
    tags: Mapping[str, str],
    started: int,
    creator: str = "",
) -> Run:
    """The run of ``key``, created where there is none.

    :param creator: of whom there is one at a time. A run that it created before, and that does not count
        since MLflow went away then, is used: else each try while MLflow fails now and then would add one.
    :param claim: a parameter and its value, the same for all who ask for this key.
    :param started: when the run began, in milliseconds since 1970.
    :raises MlflowAwayError: when MLflow does not answer.
    """
    client = server.client(uri)
    for attempt in range(_ATTEMPTS):
        there = _runs_of(uri, experiment_id, key)
        if run := next((run for run in there if _claimed(run, claim)), None):
            return run
        mine = next((run for run in there if _is_left_by(run, claim, creator)), None)
        with server.translated_errors():
            mine = mine or client.create_run(
                experiment_id,
                started,
                {**tags, KEY_TAG: _digest(key), **({_CREATOR_TAG: creator} if creator else {})},
                run_name=name or None,
            )
        others = [run for run in _runs_of(uri, experiment_id, key) if run.info.run_id != mine.info.run_id]
        # Give way at first: two that mark each other's runs get nowhere.
        my_turn = attempt >= _GIVE_WAY or all(mine.info.run_id < other.info.run_id for other in others)
        if my_turn and all(_discard(uri, other, claim) for other in others) and _set_once(uri, mine, claim):
            return _get(uri, mine) or mine
        _delete(uri, mine)
        time.sleep(random.uniform(0.1, 0.3) * (attempt + 1))
    raise MlflowAwayError(f"the run of {key!r} is being created by too many at once")


def _discard(uri: str, run: Run, claim: tuple[str, str]) -> bool:
    """Mark a run as a duplicate and delete it; False when it is the one that counts."""
    if not _set_once(uri, run, (claim[0], _DUPLICATE)):
        now = _get(uri, run)
        return now is None or not _claimed(now, claim)
    _delete(uri, run)
    return True


def _runs_of(uri: str, experiment_id: str, key: str) -> list[Run]:
    with server.translated_errors():
        return list(
            server.client(uri).search_runs(
                [experiment_id],
                f"tags.`{KEY_TAG}` = '{_digest(key)}'",
                order_by=["attributes.start_time ASC"],
            )
        )


def _claimed(run: Run, claim: tuple[str, str]) -> bool:
    return bool(run.data.params.get(claim[0]) == claim[1])


def _is_left_by(run: Run, claim: tuple[str, str], creator: str) -> bool:
    """Whether ``creator`` made the run before, and MLflow went away before it was claimed."""
    return bool(creator) and run.data.tags.get(_CREATOR_TAG) == creator and claim[0] not in run.data.params


def _set_once(uri: str, run: Run, parameter: tuple[str, str]) -> bool:
    """Set a parameter that may be set only once; False when it has another value or the run was deleted."""
    try:
        with server.translated_errors():
            server.client(uri).log_param(run.info.run_id, *parameter, synchronous=True)
    except (RecordRefusedError, RunGoneError):
        return False
    return True


def _get(uri: str, run: Run) -> Run | None:
    try:
        with server.translated_errors():
            found = server.client(uri).get_run(run.info.run_id)
    except RunGoneError:
        return None
    return found if found.info.lifecycle_stage == "active" else None


def _delete(uri: str, run: Run) -> None:
    try:
        with server.translated_errors():
            server.client(uri).delete_run(run.info.run_id)
    except (RecordRefusedError, RunGoneError):
        pass  # someone else did


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
