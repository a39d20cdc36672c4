"""Whether a job goes on with what was trained or starts anew, and what becomes of what it leaves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import checkpoint_files, restarting, runs
from saturn_airflow.launch.restarting import FROM_SCRATCH, GO_ON, Asker, RestartDecision
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.formats import NewerFormatError
from saturn_airflow.model.jobs import Job

PLAN, NEXT = 100.0, 200.0
FIRST = Asker(PLAN, try_number=1)
RETRY = Asker(PLAN, try_number=2)
CLEARED = Asker(PLAN, try_number=3, cleared_after=2)
PLANNED_ANEW = Asker(NEXT, try_number=1)
NEXT_ROUND = Asker(NEXT, try_number=1, standing=(PLAN,))
ASKERS = {"retry": RETRY, "cleared": CLEARED, "planned anew": PLANNED_ANEW, "next round": NEXT_ROUND}
ONLY_GOES_ON = {"retry", "next round"}


def ran(
    folder: Path,
    status: str = "lost",
    job: Job | None = None,
    concluded_by: Asker | None = None,
    code: str | None = None,
    **settings: Any,
) -> runs.Run:
    """A run of a job that is over, without having been started."""
    job = job or small_job()
    definition = Definition.of(job, code).to_dict()
    spec = spec_for(folder, job, priority=(PLAN, 0), definition=definition, **settings)
    path = folder / "state" / "runs" / f"{len(runs.all_of(folder / 'state')) + 1:04}"
    path.mkdir(parents=True)
    (path / "alive").touch()
    (path / "spec.json").write_text(json.dumps(spec.to_dict()))
    end = {"event": "end", "time": 1.0, "status": status, "reason": "", "traceback": "", "result": {}}
    (path / "events.jsonl").write_text(json.dumps(end) + "\n")
    run = runs.Run(path)
    if concluded_by is not None:
        restarting.conclude(run, concluded_by)
    return run


def decided(
    folder: Path, asker: Asker, job: Job | None = None, code: str | None = None, **how: Any
) -> RestartDecision:
    return restarting.decide(folder / "state", Definition.of(job or small_job(), code), asker, **how)


@pytest.mark.parametrize("who", ASKERS)
def test_unfinished_training_of_the_same_definition_goes_on(tmp_path: Path, who: str) -> None:
    ran(tmp_path)
    assert decided(tmp_path, ASKERS[who]).why_anew is None


@pytest.mark.parametrize("who", ASKERS)
def test_a_changed_definition_starts_anew_where_the_job_was_cleared(tmp_path: Path, who: str) -> None:
    ran(tmp_path)
    decision = decided(tmp_path, ASKERS[who], small_job(lr=0.5))
    if who in ONLY_GOES_ON:
        assert decision.why_anew is None
        assert decision.definition == Definition.of(small_job()), "it goes on as what it began"
    else:
        assert decision.why_anew == "its definition has changed: hparams.lr was 0.01 and is 0.5"


@pytest.mark.parametrize("who", ASKERS)
def test_a_finished_job_is_trained_again_only_where_it_was_cleared(tmp_path: Path, who: str) -> None:
    ran(tmp_path, "finished", concluded_by=FIRST)
    anew = decided(tmp_path, ASKERS[who]).why_anew
    assert (anew is None) == (who in ONLY_GOES_ON)


def test_what_finished_while_nobody_followed_it_is_a_result_that_nobody_has_had(tmp_path: Path) -> None:
    ran(tmp_path, "finished")
    assert decided(tmp_path, CLEARED).why_anew is None


def test_a_job_that_a_later_round_concluded_and_that_was_cleared_there_is_trained_again(
    tmp_path: Path,
) -> None:
    ran(tmp_path, "finished", concluded_by=Asker(NEXT, try_number=1, standing=(PLAN,)))
    cleared = Asker(NEXT, try_number=2, cleared_after=1, standing=(PLAN,))
    assert decided(tmp_path, cleared).why_anew == "it had finished, and was cleared"
    assert restarting.was_cleared(tmp_path / "state", standing=(PLAN,)), "its plan is being made anew"
    assert not restarting.was_cleared(tmp_path / "state", standing=(PLAN, NEXT))


def test_clearing_a_running_job_counts_as_clearing(tmp_path: Path) -> None:
    restarting.conclude(ran(tmp_path, "stopped"), FIRST, wanted=False)
    assert decided(tmp_path, RETRY, small_job(lr=0.5)).why_anew is not None
    assert decided(tmp_path, RETRY).why_anew is None


def test_the_version_of_the_code_counts_where_both_are_known(tmp_path: Path) -> None:
    ran(tmp_path, code="abc")
    assert decided(tmp_path, CLEARED, code="abd").why_anew is not None
    assert decided(tmp_path, CLEARED, code="abc").why_anew is None
    assert decided(tmp_path, CLEARED, code=None).definition.fields["code"] == "abc"


@pytest.mark.parametrize("who", ASKERS)
def test_a_wish_left_for_the_job_is_heard_by_whoever_comes_first(tmp_path: Path, who: str) -> None:
    ran(tmp_path)
    restarting.ask_for(tmp_path / "state", FROM_SCRATCH)
    assert decided(tmp_path, ASKERS[who]).why_anew == "this was asked for"
    restarting.ask_for(tmp_path / "state", GO_ON)
    decision = decided(tmp_path, ASKERS[who], small_job(lr=0.5))
    assert decision.why_anew is None
    assert [change.field for change in decision.changes] == ["hparams.lr"]


def test_the_conf_of_the_run_speaks_of_cleared_jobs_alone(tmp_path: Path) -> None:
    ran(tmp_path)
    assert decided(tmp_path, RETRY, wish=FROM_SCRATCH).why_anew is None
    assert decided(tmp_path, CLEARED, wish=FROM_SCRATCH).why_anew is not None
    assert decided(tmp_path, CLEARED, small_job(lr=0.5), wish=GO_ON).why_anew is None
    restarting.ask_for(tmp_path / "state", GO_ON)
    assert decided(tmp_path, CLEARED, wish=FROM_SCRATCH).why_anew is None, "what was said last counts"


def test_whoever_goes_on_after_a_change_needs_not_ask_again(tmp_path: Path) -> None:
    before, now = small_job(), small_job(lr=0.5)
    ran(tmp_path, job=before)
    checkpoint = tmp_path / "state" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    manifest = {"definition": Definition.of(before).to_dict()}
    whole = {**manifest, checkpoint_files.HASH: checkpoint_files.digest_of(manifest)}
    (checkpoint / "manifest.json").write_text(json.dumps(whole))
    decision = decided(tmp_path, CLEARED, now, wish=GO_ON)
    assert decision.goes_on_from == Definition.of(before).hash
    ran(tmp_path, job=now, try_number=3)
    for asker in (Asker(PLAN, 4, 2), Asker(PLAN, 5, 4)):
        again = decided(tmp_path, asker, now)
        assert (again.why_anew, again.goes_on_from) == (None, Definition.of(before).hash)


def test_files_of_the_version_before_tell_their_definition_too(tmp_path: Path) -> None:
    run = ran(tmp_path, "finished")
    spec = json.loads((run.folder / "spec.json").read_text())
    old = {
        k: v
        for k, v in spec.items()
        if k not in ("format", "written_by", "definition", "goes_on_from", "warnings")
    }
    old["measure"] = list(spec["measure"].values())
    (run.folder / "spec.json").write_text(json.dumps(old))
    assert decided(tmp_path, CLEARED).why_anew is None
    run.done_with()
    list(run.events())
    run.done_with()
    assert decided(tmp_path, CLEARED).why_anew == "it had finished, and was cleared"
    assert decided(tmp_path, RETRY).why_anew is None
    assert decided(tmp_path, CLEARED, small_job(seed=3)).why_anew == (
        "its definition has changed: hparams.seed was not given and is 3"
    )


def test_a_training_is_set_aside_whole_and_what_was_interrupted_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    for name in ("lock", "follower", "mine.pt", "mlflow/outbox.jsonl", "checkpoints/step-1/manifest.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    ran(tmp_path)
    aside = restarting.set_aside(folder, "asked")
    assert {path.name for path in folder.iterdir()} == {"lock", "follower", "superseded-1"}
    assert (aside / "checkpoints/step-1/manifest.json").exists()
    assert (aside / "mine.pt").read_text() == "mine.pt"
    assert restarting.number(folder) == 2
    assert runs.all_of(folder) == []

    ran(tmp_path)
    (folder / "model").mkdir()
    moved: list[Any] = []
    rename = Path.rename

    def rename_once(self: Path, target: Path) -> Path:
        if moved:
            raise OSError("the node died")
        moved.append(self.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_once)
    with pytest.raises(OSError, match="died"):
        restarting.set_aside(folder, "again")
    monkeypatch.setattr(Path, "rename", rename)
    restarting.complete(folder)
    assert {path.name for path in folder.iterdir()} == {"lock", "follower", "superseded-1", "superseded-2"}
    assert {path.name for path in (folder / "superseded-2").iterdir()} == {"model", "runs", "why.json"}
    restarting.complete(folder)
    assert restarting.number(folder) == 3


@pytest.mark.parametrize("name", ["spec.json", "manifest.json", "wish.json", "events.jsonl"])
def test_what_a_newer_version_wrote_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    run = ran(tmp_path)
    checkpoint = tmp_path / "state" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    definition = dataclasses.asdict(Definition.of(small_job()))
    (checkpoint / "manifest.json").write_text(json.dumps({"definition": definition | {"hash": ""}}))
    restarting.ask_for(tmp_path / "state", GO_ON)
    restarting.conclude(run, FIRST)
    path = next(iter((tmp_path / "state").rglob(name)))
    newer = {"format": 9, "written_by": "4.5.6"}
    if name == "events.jsonl":
        path.write_text(json.dumps({"event": "format", **newer}) + "\n" + path.read_text())
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | newer))
    with pytest.raises(NewerFormatError, match=rf"{name}|step-0+10") as caught:
        decided(tmp_path, CLEARED)
    assert "format 9, written by saturn-airflow 4.5.6" in str(caught.value)
    assert "Upgrade it here to 4.5.6 or later" in str(caught.value)
    assert path.exists()


def test_no_job_has_been_trained_where_nothing_is(tmp_path: Path) -> None:
    assert decided(tmp_path, FIRST, wish=FROM_SCRATCH) == RestartDecision(Definition.of(small_job()))


def test_a_note_that_finds_no_room_leaves_the_one_before_whole(small_disk: Any) -> None:
    run = ran(small_disk.path, "stopped")
    restarting.conclude(run, FIRST, wanted=False)
    small_disk.fill()
    restarting.conclude(run, Asker(NEXT, try_number=7, standing=(PLAN,)))
    assert not FIRST.goes_on_with(run), "the user cleared it"
