"""Saying that MLflow takes no records: once for each reason, not each time that it is tried."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

_AWAY = (
    "MLflow takes no records (%s). They are kept in %s and sent when it does: by this sweep's tasks, those "
    "still to come too, or by the first and the last task of a later sweep"
)
# By the server's address, as long as this process sends to it in vain.
_said: dict[str, set[str]] = {}


def say(uri: str, reason: str, folder: Path) -> None:
    """Say that records are kept, unless this process has said so of this server for this reason.

    :param folder: the outbox's.
    """
    said = _said.setdefault(uri, set())
    if reason not in said:
        said.add(reason)
        log.warning(_AWAY, reason, folder)


def over(uri: str) -> None:
    """Forget what was said of a server: it takes records again."""
    _said.pop(uri, None)
