"""Going on with a job's training, or starting it anew: what decides it, and where the old one goes.

The folder of a job holds one training: its runs, its checkpoints, its records for MLflow. When the job starts
anew, all of that moves into a folder ``superseded-1`` (``-2``...) beside it, and nothing of it is read again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from saturn_airflow.launch import checkpoint_files, runs
from saturn_airflow.launch.runs import Run
from saturn_airflow.model import formats, json_text
from saturn_airflow.model.definition import CODE, Change, Definition
from saturn_airflow.model.disks import write_whole
from saturn_airflow.model.folders import SUPERSEDED, superseded
from saturn_airflow.model.status import Status

Wish = Literal["from_scratch", "go_on", "as_planned"]
FROM_SCRATCH: Wish = "from_scratch"
GO_ON: Wish = "go_on"
#: By the plan that there is, whatever the DAG's file says by now.
AS_PLANNED: Wish = "as_planned"
#: What a process holds locks on, or is the wish of somebody about the next training.
_STAYS = ("lock", "follower")
_LEAVING = ".being-superseded"
_WISH, _CONCLUSION = "wish.json", "concluded.json"


@dataclass(frozen=True)
class Asker:
    """The try of a task that wants to train a job.

    :param attempt: when its plan was made, in seconds since the epoch.
    :param try_number: from 1.
    :param cleared_after: the last try before somebody cleared the task; 0 where nobody did.
    :param standing: when the plans of earlier rounds were made that still stand.
    """

    attempt: float
    try_number: int = 1
    cleared_after: int = 0
    standing: Sequence[float] = ()

    def goes_on_with(self, run: Run) -> bool:
        """Whether this try only goes on with what ``run`` did: nobody cleared the job since."""
        attempt, try_number, wanted = _concluded(run)
        if attempt == self.attempt:
            return wanted and try_number > self.cleared_after
        return wanted and attempt in self.standing


@dataclass(frozen=True)
class RestartDecision:
    """What becomes of the training that a job's folder holds.

    :param why_anew: why the job starts anew; None where it goes on.
    :param definition: of the training that goes on or begins.
    :param goes_on_from: the hash of another definition whose checkpoints it takes.
    :param changes: what has changed in the definition since.
    """

    definition: Definition
    why_anew: str | None = None
    goes_on_from: str | None = None
    changes: list[Change] = field(default_factory=list)


def decide(
    folder: Path,
    now: Definition,
    asker: Asker,
    wish: Wish | None = None,
    say: Callable[[Change], str] = str,
) -> RestartDecision:
    """Whether a job goes on with the training in its folder.

    A retry goes on, whatever has changed. A job that was cleared goes on where it was not finished and its
    definition is the same; else it starts anew.

    :param now: the job's present definition.
    :param wish: what the user wants of cleared jobs.
    :param say: how a change is put into words.
    :raises NewerFormatError: when a newer version wrote what is there in a way that this one can't read.
    """
    found = runs.all_of(folder)
    told = wish_of(folder)
    before = _definition_of(found[-1]) if found else _definition_of_newest(folder)
    if before is None:
        return RestartDecision(now)
    if told == FROM_SCRATCH:
        return RestartDecision(now, "this was asked for")
    changes = before.changes(now)
    if found and asker.goes_on_with(found[-1]) and not (told == GO_ON and changes):
        return RestartDecision(before, goes_on_from=_other(folder, before))
    if wish == FROM_SCRATCH and told in (None, AS_PLANNED):
        return RestartDecision(now, "the DAG run's conf asks for it")
    if changes and GO_ON in (told, wish):
        return RestartDecision(now, goes_on_from=_other(folder, now), changes=changes)
    if changes:
        words = "; ".join(map(say, changes))
        return RestartDecision(now, f"its definition has changed: {words}", changes=changes)
    if found and is_concluded(found[-1]) and _has_finished(found[-1]):
        return RestartDecision(now, "it had finished, and was cleared")
    # What could not be asked for now is as it was.
    known = now if CODE in now.fields else before
    return RestartDecision(known, goes_on_from=_other(folder, known))


def cleared_under_its_plan(folder: Path, asker: Asker) -> Run | None:
    """The last run of a job that ran under the plan it is to be trained by, and was cleared since; None where
    it was not, or is to be trained as planned."""
    found = runs.all_of(folder)
    if not found or asker.goes_on_with(found[-1]) or wish_of(folder) == AS_PLANNED:
        return None
    return found[-1] if _concluded(found[-1])[0] == asker.attempt else None


def set_aside(folder: Path, why: str) -> Path:
    """Move the training in a job's folder aside; no run may be alive, and one process alone may do this.

    Where this was interrupted, the next call completes it: see :func:`complete`.

    :returns: where it is now.
    """
    leaving = folder / _LEAVING
    leaving.mkdir(parents=True, exist_ok=True)
    write_whole(leaving / "why.json", json.dumps({"why": why, "time": time.time()}))
    complete(folder)
    return folder / superseded(number(folder) - 1)


def complete(folder: Path) -> None:
    """Complete what an interrupted :func:`set_aside` began."""
    leaving = folder / _LEAVING
    if not leaving.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path != leaving and path.name not in _STAYS and not path.match(SUPERSEDED):
            path.rename(leaving / path.name)
    leaving.rename(folder / superseded(number(folder)))


def number(folder: Path) -> int:
    """Which training of the job its folder holds, from 1."""
    return 1 + len(list(Path(folder).glob(SUPERSEDED)))


def conclude(run: Run, asker: Asker, *, wanted: bool = True) -> None:
    """Note which try of a task has dealt with the end of a run.

    :param wanted: False where the user cleared the task while it ran.
    """
    note = {"attempt": asker.attempt, "try_number": asker.try_number, "wanted": wanted}
    with contextlib.suppress(OSError):
        write_whole(run.folder / _CONCLUSION, json.dumps(note))


def is_concluded(run: Run) -> bool:
    """Whether a task has dealt with the end of this run."""
    if (run.folder / _CONCLUSION).exists():
        return True
    # Format 1 had no note of it, but all of the run was followed.
    with contextlib.suppress(OSError, ValueError):
        return int((run.folder / "followed").read_text()) == (run.folder / "events.jsonl").stat().st_size
    return False


def was_cleared(folder: Path, standing: Sequence[float]) -> bool:
    """Whether the job finished under a plan that does not stand any more, and is to be trained again."""
    found = runs.all_of(folder)
    if not found or not is_concluded(found[-1]) or not _has_finished(found[-1]):
        return False
    return _concluded(found[-1])[0] not in standing


def ask_for(folder: Path, wish: Wish) -> None:
    """Leave a wish for the next time that the job is trained."""
    told = {**formats.stamp("a wish"), "wish": wish, "time": time.time()}
    write_whole(folder / _WISH, json.dumps(told))


def wish_of(folder: Path) -> Wish | None:
    """The wish that was left for the job."""
    path = folder / _WISH
    try:
        wish = json_text.parse(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(wish, dict) or "wish" not in wish:
        return None
    formats.check(wish, "a wish", path)
    known: dict[str, Wish] = {FROM_SCRATCH: FROM_SCRATCH, AS_PLANNED: AS_PLANNED}
    return known.get(str(wish["wish"]), GO_ON)


def forget_wish(folder: Path) -> None:
    """Take back the wish that was left: it has been granted."""
    (folder / _WISH).unlink(missing_ok=True)


def _concluded(run: Run) -> tuple[float, int, bool]:
    """The attempt and the try that a run belongs to, and whether the user left it to go on."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        note = json_text.parse((run.folder / _CONCLUSION).read_text())
        return float(note["attempt"]), int(note["try_number"]), bool(note["wanted"])
    spec = run.spec
    return spec.priority[0], spec.try_number, True


def _has_finished(run: Run) -> bool:
    end = run.end
    return end is not None and end["status"] == Status.FINISHED


def _definition_of(run: Run) -> Definition:
    return Definition.from_dict(run.spec.definition)


def _definition_of_newest(folder: Path) -> Definition | None:
    """The definition of the newest checkpoint, where there is one that says."""
    for path in checkpoint_files.newest_first((folder / "checkpoints").glob("*")):
        manifest = checkpoint_files.manifest_of(path)
        formats.check(manifest, "a checkpoint", path)
        if checkpoint_files.is_whole(manifest) and "definition" in manifest:
            return Definition.from_dict(manifest["definition"])
    return None


def _other(folder: Path, definition: Definition) -> str | None:
    """The hash of the newest checkpoint's definition, where that is another."""
    newest = _definition_of_newest(folder)
    return None if newest is None or not newest.changes(definition) else newest.hash
