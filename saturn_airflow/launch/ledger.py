"""The ledger of a deployment: the sweeps that are measured or planned and have not ended, a file for each.

A plan writes its sweep's file as a whole, in the place of what was written when its trials were listed, and
the sweep's report removes it; nobody else writes any, so that there is nothing to lock. How far jobs are, and
where they run, is read from what their runs write.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from saturn_airflow.launch import read_apart, whereabouts
from saturn_airflow.launch.whereabouts import Whereabouts
from saturn_airflow.model import json_text
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.folders import OF_SWEEPS, slug
from saturn_airflow.model.formats import NewerFormatError
from saturn_airflow.model.sharing import SharedCluster, SharedJob, SharedSweep, SharingRules
from saturn_airflow.model.status import WORTH_A_RETRY

log = logging.getLogger(__name__)

#: For how long devices are taken to be busy on which a job runs under a strategy that its plan did not know.
_UNKNOWN_SECONDS = 60.0
#: For how long jobs' folders that do not answer are waited for, all together.
_PATIENCE_SECONDS = 5.0


@functools.lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Log it once in each process: who waits looks every few seconds."""
    log.warning("%s", message)


class Ledger:
    """The active sweeps of the deployment whose state is in ``home`` (``[saturn] home``).

    :param warn: called with what can't be read, and why, perhaps again and again.
    """

    def __init__(self, home: Path, warn: Callable[[str], object] = warn_once) -> None:
        self._home = home
        self._warn = warn
        self._patience = read_apart.Patience(_PATIENCE_SECONDS)
        # Beside the folders of DAGs, of which none begins with a dot, and closed to others as these are.
        self._folder = home / "sweeps" / ".active"

    def write(self, sweep: ActiveSweep) -> None:
        """Let all know of ``sweep``, in the place of what they knew of it.

        :raises OSError: when its file can't be written.
        """
        path = self._file(sweep.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(sweep.to_dict()))

    def remove(self, key: str) -> None:
        """The sweep has ended."""
        with suppress(OSError):
            self._file(key).unlink()

    def sweeps(self) -> list[ActiveSweep]:
        """All that can be read, first planned first; of others a warning is logged."""
        found = [self._read(path) for path in sorted(self._folder.glob("*.json"))]
        return sorted(filter(None, found), key=lambda sweep: (sweep.made, sweep.key))

    def sweep(self, key: str) -> ActiveSweep | None:
        """That of ``key``; None where it is not active, or can't be read, of which a warning is logged."""
        return self._read(self._file(key))

    def cluster(
        self,
        sweeps: Iterable[ActiveSweep],
        nodes: Iterable[Node] = (),
        now: float | None = None,
        whole: str | None = None,
    ) -> SharedCluster:
        """The nodes of ``sweeps``, and how far each sweep is.

        :param nodes: more nodes, or others in the place of those of the same name.
        :param now: seconds since the epoch.
        :param whole: a sweep that is going to be planned anew: its jobs have all of their strategies.
        """
        from saturn_airflow.sharing.pace import at_pace_seen

        now, sweeps = time.time() if now is None else now, list(sweeps)
        by_name = {node.name: node for active in sweeps for node in active.nodes}
        by_name |= {node.name: node for node in nodes}
        shared: list[SharedSweep] = []
        busy: dict[tuple[str, int], float] = {}
        kinds = {name: node.kind for name, node in by_name.items()}
        for active in sweeps:
            jobs, paces = [], {}
            for job in active.sweep.jobs:
                p = self._where(active, job.name)
                if p.given_up or (p.status is not None and p.status not in WORTH_A_RETRY):
                    continue
                if active.sweep.trials and p.status is not None:  # however it ended, that is an answer
                    continue
                state = _job_now(job, p, now)
                if p.pace is not None:
                    paces[job.name] = p.pace
                if state.place is not None and not _is_known(state, by_name.get(state.place.node)):
                    busy |= {(state.place.node, d): now + _UNKNOWN_SECONDS for d in state.place.device_ids}
                    state = replace(state, place=None)
                jobs.append(state)
            if jobs:
                left = replace(active.sweep, jobs=tuple(jobs))
                shared.append(at_pace_seen(left, paces, kinds, SharingRules.off_by))
        found = (one if one.name == whole else one.as_kept() for one in _without_overlaps(shared))
        return SharedCluster(now, tuple(by_name.values()), tuple(found), busy)

    def _where(self, active: ActiveSweep, job: str) -> Whereabouts:
        """Where a job of ``active`` is; as if it had not begun where that can't be read, with a warning."""
        folder = self._home / active.folder / slug(job, OF_SWEEPS)
        try:
            return self._patience.within(str(folder), lambda: whereabouts.of(folder))
        except Exception as error:  # it is damaged, of a newer version, just taken away, or does not answer
            # Who asks plans, waits or trains beside this job: whatever it wrote must not end that.
            what = f"how far {job} of {active.key} is can't be read, and it counts as not begun"
            self._warn(f"{what}: {folder}: {type(error).__name__}: {error}")
            return Whereabouts()

    def _read(self, path: Path) -> ActiveSweep | None:
        try:
            return ActiveSweep.from_dict(json_text.parse(_text_of(path)), path)
        except FileNotFoundError:  # it ended just now
            return None
        except (OSError, ValueError, InvalidSweepError, NewerFormatError) as error:
            self._warn(f"an active sweep is left out of account: {path}: {error}")
            return None

    def _file(self, key: str) -> Path:
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _text_of(path: Path) -> str:
    # Opened so that nothing that somebody put in its place, such as a FIFO, holds up who reads.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no file")
        return file.read()


def _job_now(job: SharedJob, p: Whereabouts, now: float) -> SharedJob:
    """``job``, which is not done, as its runs say it is."""
    state = replace(job, left=max(0.0, 1 - p.share))
    if p.place is None:
        return state
    known = state.leaves_in if p.leaves_in is None else p.leaves_in
    state = replace(state, place=p.place, since=p.since, leaves_in=known)
    if _knows_its_strategy(state):
        # Its node's clock may be ahead of this one.
        setting_up = max(0.0, state.option.setup - max(0.0, now - p.since))
        state = replace(state, setting_up=setting_up)
    return state


def _knows_its_strategy(job: SharedJob) -> bool:
    place = job.place
    assert place is not None
    return any((o.technique, o.devices) == (place.technique, place.devices) for o in job.job.options)


def _is_known(job: SharedJob, node: Node | None) -> bool:
    """Whether it is known how long ``job`` has its devices of ``node``: sweeps may differ in what they say of
    a node.

    :param node: None for one that no sweep has.
    """
    place = job.place
    assert place is not None
    if not _knows_its_strategy(job):
        return False
    return node is None or (node.kind in job.option.seconds and max(place.device_ids) < node.devices)


def _without_overlaps(sweeps: Iterable[SharedSweep]) -> tuple[SharedSweep, ...]:
    """``sweeps``, where of two jobs on one device only the later runs: the other has left it by now."""
    running = [(sweep.name, job) for sweep in sweeps for job in sweep.jobs if job.place is not None]
    latest: dict[tuple[str, int], tuple[str, str]] = {}
    for name, job in sorted(running, key=lambda one: one[1].since):
        assert job.place is not None
        latest |= {(job.place.node, device): (name, job.name) for device in job.place.device_ids}

    def as_it_is(name: str, job: SharedJob) -> SharedJob:
        if job.place is None:
            return job
        holders = {latest[job.place.node, device] for device in job.place.device_ids}
        return job if holders == {(name, job.name)} else replace(job, place=None, setting_up=0.0)

    return tuple(replace(s, jobs=tuple(as_it_is(s.name, job) for job in s.jobs)) for s in sweeps)
