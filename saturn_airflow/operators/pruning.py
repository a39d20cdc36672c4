"""Removing the files of sweeps that ended long ago."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from airflow.sdk import conf

from saturn_airflow.operators.context import home
from saturn_airflow.operators.leftovers import PATIENCE_SECONDS
from saturn_airflow.operators.shared_clock import ahead_of

_DAY = 86400.0


def prune(
    keep: Path | None = None, log: Callable[[str], object] = lambda line: None, days: float | None = None
) -> list[Path]:
    """Remove the folders of sweeps in which nothing was written for ``[saturn] keep_sweeps_days``.

    Kept are sweeps in which something still runs, and those with records that MLflow has not taken.

    :param keep: the folder of a sweep that stays, such as the one that asks.
    :param days: other than configured; 0 keeps all.
    :returns: what was removed.
    """
    from saturn_airflow.launch import read_apart

    days = conf.getfloat("saturn", "keep_sweeps_days", fallback=30.0) if days is None else days
    if days <= 0:
        return []
    # The times of files are the disk's.
    before = time.time() - (ahead_of(home()) or 0.0) - days * _DAY

    def may_go(sweep: Path) -> bool:
        return sweep != keep and sweep.is_dir() and _may_go(sweep, before)

    removed = []
    for sweep in read_apart.those(sorted((home() / "sweeps").glob("*/*/*")), may_go, PATIENCE_SECONDS):
        log(f"Removing {sweep}: nothing was written there for {days:g} days ([saturn] keep_sweeps_days)")
        # Another sweep may be at it, too.
        shutil.rmtree(sweep, ignore_errors=True)
        removed.append(sweep)
        with contextlib.suppress(OSError):  # the DAG run has others
            sweep.parent.rmdir()
    return removed


def _may_go(sweep: Path, before: float) -> bool:
    from saturn_airflow import tracking
    from saturn_airflow.launch import runs

    # What changes while a sweep lives; looking at every shard of every checkpoint would take long.
    written = [sweep, *sweep.glob("*"), *sweep.glob("*/runs/*"), *sweep.glob("*/runs/*/*")]
    written += sweep.glob("*/checkpoints/*")
    try:
        if any(path.stat().st_mtime >= before for path in written):
            return False
    except OSError:  # somebody else removes it, or may not be looked at
        return False
    jobs = [*sweep.glob("*/"), *sweep.glob("trials/*/")]
    return not any(runs.attach(job) for job in jobs) and not tracking.has_unsent(sweep)
