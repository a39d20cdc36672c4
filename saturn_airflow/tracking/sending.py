"""Sending what waits in the folders of sweeps and jobs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from saturn_airflow.launch import rights
from saturn_airflow.model.folders import SUPERSEDED
from saturn_airflow.tracking import absence
from saturn_airflow.tracking.outbox import Outbox
from saturn_airflow.tracking.sender import Sender
from saturn_airflow.tracking.server import MlflowAwayError

log = logging.getLogger(__name__)


def send_outbox(uri: str, folder: str | Path, patience: float = 5.0) -> bool:
    """Send what is left of a sweep and its jobs, and of their trainings that were superseded.

    What can't be read or locked stays, with a warning: others are sent all the same.

    :param patience: seconds to try for, all in all, while MLflow does not answer.
    :returns: whether MLflow has everything.
    """
    deadline = time.monotonic() + patience
    own, *of_jobs = _outboxes(folder)
    stuck = False
    # What a sweep says of its jobs comes after theirs: their models can be registered then.
    for outbox in (*reversed(of_jobs), own):
        if stuck and outbox is own:
            return False
        try:
            # The first that is not taken uses up the patience for all.
            if outbox.size() and not _try_for(Sender(uri, outbox), deadline - time.monotonic()):
                return False
        except OSError as error:
            _say_stuck(outbox, error)
            stuck = True
    return not stuck


@contextlib.contextmanager
def nobody_sends(folder: str | Path) -> Iterator[bool]:
    """See to it that nobody sends the records of a folder meanwhile, so that they can be moved.

    :returns: whether nobody does, after a minute at the most.
    """
    deadline = time.monotonic() + 60
    while True:
        with Outbox(folder).sole_sender() as sole:
            if sole or time.monotonic() > deadline:
                yield sole
                return
        time.sleep(0.1)


def has_unsent(folder: str | Path) -> bool:
    """Whether something is left that :func:`send_outbox` would send; MLflow is not asked."""
    return any(outbox.size() > outbox.state().get("offset", 0) for outbox in _outboxes(folder))


def _outboxes(folder: str | Path) -> list[Outbox]:
    children = [*Path(folder).glob("*/"), *Path(folder).glob(f"*/{SUPERSEDED}/")]
    return [Outbox(folder), *map(Outbox, sorted(children))]


def send_patiently(sender: Sender, patience: float) -> bool:
    """Send what waits, trying for ``patience`` seconds. Returns whether all was sent.

    What can't be read or locked stays, with a warning.
    """
    try:
        return _try_for(sender, patience)
    except OSError as error:
        _say_stuck(sender.outbox, error)
        return False


def _say_stuck(outbox: Outbox, error: OSError) -> None:
    why = rights.why_not(outbox.folder) or f"{error.filename or outbox.folder}: {error.strerror or error}"
    log.warning("The records in %s can't be sent to MLflow, and stay there: %s", outbox.folder, why)


def _try_for(sender: Sender, patience: float) -> bool:
    """:raises OSError: when the records can't be read or locked."""
    deadline = time.monotonic() + patience
    pause = 0.25
    while True:
        reason = None
        try:
            if sender.send():
                return True
        except MlflowAwayError as error:
            reason = str(error)
        if time.monotonic() + pause > deadline:
            if reason is None:
                log.info("Another process is sending the records in %s to MLflow", sender.outbox.folder)
            else:
                absence.say(sender.uri, reason, sender.outbox.folder)
            return False
        time.sleep(pause)
        pause = min(2.0, pause * 2)
