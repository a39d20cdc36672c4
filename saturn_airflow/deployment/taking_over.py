"""What a Celery worker does as it starts: it deals with what the worker before it left, which was killed.

With Redis, what a worker had taken stays "unacknowledged" when it is killed, and comes back only after the
visibility timeout, which must be longer than the longest training. Until then Airflow waits: for a task that
had not begun until ``task_queued_timeout``, for one that ran until ``task_instance_heartbeat_timeout``. The
worker that comes back under the same name knows better: who had its name is dead.

- What had not begun goes back into the queue. Should somebody else have taken it after all, Airflow itself
  refuses the second one.
- What had begun is told to Airflow as failed, through Celery's results, and is tried again.
- Processes that the dead worker left (Airflow's clean-up of bundles, which a unit with ``KillMode=process``
  spares) are ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery import Celery, states
from celery.signals import celeryd_after_setup

log = logging.getLogger(__name__)
# Workers import this before they take anything: what was taken before is the dead worker's.
_BEGAN = time.time()


class WorkerKilledError(Exception):
    """The worker that ran a task was killed."""


@celeryd_after_setup.connect  # type: ignore[untyped-decorator]
def take_over(sender: str, instance: Any, **_: Any) -> None:
    """Deal with what the worker before this one left, whose name this one has.

    It is done before the worker has its processes and connections: meanwhile Airflow plans the next tries.

    :param sender: the worker's name.
    :param instance: Celery's worker.
    """
    try:
        end_leftovers()
        queues = set(instance.app.amqp.queues.consume_from)
        # What this opens must not be in the processes that the worker forks.
        with Celery(set_as_current=False) as app:
            app.conf.update(instance.app.conf)
            back, failed = hand_back(app, sender, queues, _BEGAN)
        if back or failed:
            log.warning(
                "The worker before this one was killed: %d of its tasks are in the queue again, %d are tried "
                "again",
                back,
                failed,
            )
    except Exception:  # a worker that starts is worth more than what it takes over
        log.exception("What the worker before this one left could not be taken over")


def hand_back(app: Any, hostname: str, queues: Collection[str], before: float) -> tuple[int, int]:
    """Deal with unacknowledged messages that were taken for a worker that is dead.

    :param app: the Celery app.
    :param hostname: the name of the dead worker, and of this one.
    :param queues: those it took from.
    :param before: when it was dead for sure, in seconds since the epoch.
    :returns: how many were put back into their queue, and how many were told to have failed.
    """
    back = failed = 0
    # A connection of its own: those of the app's pools belong to the worker's loop.
    with app.connection_for_read() as connection:
        channel = connection.channel()
        if not hasattr(channel, "unacked_key"):
            return 0, 0  # other brokers notice by themselves that a consumer is gone
        with channel.conn_or_acquire() as client:
            tags = client.zrangebyscore(channel.unacked_index_key, "-inf", before)
            taken = dict(zip(tags, client.hmget(channel.unacked_key, tags), strict=True)) if tags else {}
        # The last that is put back is the first to be taken.
        for tag, text in reversed(taken.items()):
            message, _, queue = json.loads(text) if text else ({}, "", None)
            if queue not in queues:
                continue
            task_id = message["headers"]["id"]
            known = app.backend.get_task_meta(task_id)
            if known["status"] == states.PENDING:
                channel.qos.restore_by_tag(_text(tag))
                back += 1
            elif known["status"] == states.STARTED and (known["result"] or {}).get("hostname") == hostname:
                error = WorkerKilledError(f"{hostname} was killed")
                app.backend.store_result(task_id, error, states.FAILURE, traceback=str(error))
                channel.qos.reject(_text(tag))
                failed += 1
    return back, failed


def end_leftovers() -> list[int]:
    """End what an earlier worker of the same command line left: processes whose group has lost its leader.

    :returns: their ids.
    """
    ended = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            # The interpreter's path may be written in two ways.
            if pid == os.getpid() or words[1:] != sys.orig_argv[1:] or folder.stat().st_uid != os.getuid():
                continue
            leader = os.getpgid(pid)
            if leader not in (pid, os.getpgrp()) and not Path(f"/proc/{leader}").exists():
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
    return ended


def _text(tag: bytes | str) -> str:
    return tag.decode() if isinstance(tag, bytes) else tag
