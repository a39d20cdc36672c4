"""Removing the files of sweeps that ended long ago."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from airflow.sdk import conf

from saturn_airflow.operators.context import home

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
    days = conf.getfloat("saturn", "keep_sweeps_days", fallback=30.0) if days is None else days
    if days <= 0:
        return []
    removed = []
    for sweep in sorted((home() / "sweeps").glob("*/*/*")):
        if sweep != keep and sweep.is_dir() and _may_go(sweep, time.time() - days * _DAY):
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
