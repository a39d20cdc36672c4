"""What earlier versions wrote is read, what a later one adds is ignored, what can't be read is refused, kept.

``write_files.py`` says how the files of a version are made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow import tracking
from saturn_airflow.deciding.entering import entries
from saturn_airflow.launch import past_runs, progress, restarting, runs
from saturn_airflow.launch.handed_over import HandedOver
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.launch.runs import Run
from saturn_airflow.model import formats
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.estimates import Estimate, Trial
from saturn_airflow.model.formats import FORMATS, NewerFormatError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.model.plan import Assignment, Plan
from saturn_airflow.operators.context import outcome_of, readable
from saturn_airflow.operators.profile_task import broken_of
from saturn_airflow.operators.wave_tasks import listed
from saturn_airflow.profiling.fingerprints import fingerprint
from saturn_airflow.profiling.knowledge import Knowledge
from saturn_airflow.profiling.options import by_key

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "files"
USERLAND = ROOT / "tests" / "training" / "userland"
VERSIONS = sorted(path.name for path in FILES.iterdir())
NEWER = {"format": 99, "written_by": "4.5.6"}
JOB = Job("small", load_model="m:f", load_dataloader="d:f", hparams=HParams(lr=0.1))


@pytest.fixture(params=VERSIONS)
def sweep(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The files of a sweep that a version left, as if it had run here."""
    folder = tmp_path / "sweep"
    shutil.copytree(FILES / request.param, folder)
    for path in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
        text = path.read_text().replace("/tmp/saturn-files/sweep", str(folder))
        path.write_text(text.replace("/tmp/saturn-files/userland", str(USERLAND)))
    return folder


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def run_as_asked(folder: Path, asked: dict[str, Any]) -> Any:
    """Run a spec that some version wrote with the supervisor of this one."""
    run = folder / "runs" / "0002"
    run.mkdir(parents=True)
    (run / "spec.json").write_text(json.dumps(asked))
    end = runs._start(runs.read_spec(run), run, HandedOver()).wait()
    assert end["status"] == "finished", end["reason"]
    return end["result"]


@pytest.mark.ranks
def test_training_goes_on_from_the_checkpoint_and_the_spec_of_the_version(
    sweep: Path, tmp_path: Path
) -> None:
    asked = json.loads((sweep / "job" / "runs" / "0001" / "spec.json").read_text())
    asked |= {"batch_count": None, "leases_folder": str(tmp_path / "leases")}
    result = run_as_asked(sweep / "job", asked)
    assert (result["batches"], result["steps"]) == (7, 12)
    whole = run_as_asked(tmp_path / "other", {**asked, "folder": str(tmp_path / "other")})
    assert result["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert progress.of(sweep / "job").steps == 12


def test_what_became_of_a_run_is_read(sweep: Path) -> None:
    (run,) = runs.all_of(sweep / "job")
    assert run.end is not None
    assert run.end["status"] == "stopped"
    assert run.spec.measure.warmups == 2
    seen = progress.of(sweep / "job")
    assert (seen.steps, seen.total, seen.status) == (5, 12, "stopped")
    saved = past_runs.last_checkpoint(sweep / "job")
    assert saved is not None
    assert Path(saved["path"]).is_dir()
    assert past_runs.time_on_devices(sweep / "job")["actual_seconds"] > 0
    cleared = restarting.Asker(200.0)
    job = run.spec.job
    assert restarting.decide(sweep / "job", Definition.of(job, "abc"), cleared).why_anew is None
    changed = Definition.of(JOB)
    assert "hparams.lr was 0.01 and is 0.1" in str(
        restarting.decide(sweep / "job", changed, cleared).why_anew
    )


@pytest.mark.slow
def test_records_that_were_not_sent_are_sent(sweep: Path, uri: str) -> None:
    assert tracking.has_unsent(sweep)
    assert tracking.send_outbox(uri, sweep)
    assert not tracking.has_unsent(sweep)
    assert not list(sweep.rglob("refused.jsonl"))
    mark = json.loads((sweep / "xcoms.json").read_text())["known"][0]["fingerprint"]
    assert len(tracking.estimate_store.find(uri, [mark], {"torch": "2.13"})) == 1


def test_what_tasks_handed_on_is_read(sweep: Path) -> None:
    xcoms = json.loads((sweep / "xcoms.json").read_text())
    (job,) = map(Job.from_dict, xcoms["jobs"])
    for trial in xcoms["trials"]:
        formats.check(trial, "a trial", "")
        assert Trial.from_dict(trial).job == job
    for found in xcoms["estimates"]:
        readable(found, "an estimate")
    assert Estimate.from_dict(xcoms["estimates"][0]["estimate"]).seconds_per_batch == 0.01
    assert broken_of(xcoms["estimates"][1]) == {"broken": "it raised"}
    for entry in xcoms["entries"]:
        formats.check(entry, "an entry of a plan", "")
        assert PlanEntry.from_dict(entry).place == ("single", 1, "local", (0,))
    assert Plan.from_dict(xcoms["plan"]).makespan == 9.0
    assert Cluster.from_dict(xcoms["plan"]).devices == 1
    outcome = outcome_of(xcoms["outcome"])
    assert (outcome.job, outcome.status, outcome.attempt, outcome.loss) == ("small", "finished", 100.0, 0.5)


def _spec() -> RunSpec:
    return RunSpec(job=JOB, technique="single", folder="f", node="n", slots=1, devices=1)


def _trial() -> Trial:
    return Trial(job=JOB, technique="single", devices=1, node="n", covers=("small",), fingerprint="f")


def _estimate() -> Estimate:
    return Estimate(fingerprint=fingerprint(JOB), technique="single", devices=1, kind="cpu")


def _plan() -> Plan:
    assignment = Assignment("small", "single", 1, "n", (0,), 0.0, 1.0)
    return Plan("p", "makespan", 1.0, 1.0, 1.0, (assignment,))


def _entry() -> PlanEntry:
    node = Cluster.from_dict({"nodes": [{"name": "n", "devices": 1, "kind": "cpu"}]})
    (entry,) = entries(_plan(), {"small": JOB}, by_key(_estimate()), node, 100.0)
    return replace(entry, round=2, standing=(100.0,), goes_on=(90.0, 3), besides_seconds=0.5)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (_spec, RunSpec.from_dict),
        (_trial, Trial.from_dict),
        (_estimate, Estimate.from_dict),
        (_plan, Plan.from_dict),
        (_entry, PlanEntry.from_dict),
    ],
    ids=["spec", "trial", "estimate", "plan", "entry"],
)
def test_fields_that_a_later_version_adds_are_ignored(
    make: Callable[[], Any], read: Callable[[Any], Any]
) -> None:
    made = make()
    data = json.loads(json.dumps(made.to_dict()))
    for inner in (data.get("measure"), *data.get("assignments", ())):
        if inner is not None:
            inner["colour"] = "red"
    assert read({**data, "colour": "red", **formats.stamp("a plan")}) == made


@pytest.mark.parametrize("what", FORMATS)
def test_a_newer_format_is_refused_by_name(what: str) -> None:
    formats.check(formats.stamp(what), what, "here")
    with pytest.raises(NewerFormatError) as caught:
        formats.check(NEWER, what, "/some/file")
    assert str(caught.value).startswith(
        f"/some/file is {what} in format 99, written by saturn-airflow 4.5.6; this is saturn-airflow "
    )
    with pytest.raises(AirflowFailException, match=r"Upgrade it here to 4\.5\.6 or later"):
        readable(NEWER, what)


def test_records_in_a_newer_format_are_kept(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    tags = {"saturn.sweep": "d/r/s"}
    tracking.open_sweep("http://127.0.0.1:9", "d", "s", tags, {}, tmp_path, patience=0.0)
    path = tmp_path / "mlflow" / "outbox.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | NEWER) + "\n")
    before = path.read_bytes()
    assert not tracking.send_outbox(uri, tmp_path, patience=0.0)
    assert path.read_bytes() == before
    assert tracking.has_unsent(tmp_path)
    assert not (tmp_path / "mlflow" / "refused.jsonl").exists()
    assert "an outbox in format 99, written by saturn-airflow 4.5.6" in caplog.text


def test_a_run_in_a_newer_format_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "0001"
    path.mkdir(parents=True)
    (path / "alive").touch()
    (path / "spec.json").write_text(json.dumps(_spec().to_dict() | NEWER))
    (path / "events.jsonl").write_text(json.dumps({"event": "format", **NEWER}) + "\n")
    for look in (lambda: Run(path).spec, lambda: Run(path).end, lambda: Run(path).so_far()):
        with pytest.raises(NewerFormatError, match="in format 99"):
            look()


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_of_the_version_before_read_what_a_newer_head_hands_on(version: str, tmp_path: Path) -> None:
    """Machines that schedule are upgraded first."""
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", version], check=False).returncode:
        pytest.skip(f"the history here does not reach back to {version}")
    archive = subprocess.run(["git", "-C", ROOT, "archive", version, "saturn_airflow"], capture_output=True)
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    node = Cluster.from_dict({"nodes": [{"name": "n", "devices": 1, "kind": "cpu"}]})
    knowledge = Knowledge.of([JOB], node, ["single"], [])
    handed = {
        "entries": [
            entry.to_dict() for entry in entries(_plan(), {"small": JOB}, by_key(_estimate()), node, 100.0)
        ],
        "trials": listed(list(knowledge.strategies), knowledge, 100.0),
        "node": next(iter(node)).to_dict(),
    }
    assert handed["trials"]
    code = """
        import json, sys
        from saturn_airflow.model.cluster import Node
        from saturn_airflow.model.estimates import Trial
        from saturn_airflow.model.jobs import Job
        handed = json.load(sys.stdin)
        for trial in handed["trials"]:
            # As its ProfileOperator does.
            own = ("attempt", "made", "position")
            Trial.from_dict({key: value for key, value in trial.items() if key not in own})
        for entry in handed["entries"]:
            Job.from_dict(entry["job"])
            print(entry["attempt"], entry["position"], entry["technique"], entry["after"])
        Node(**handed["node"])
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=json.dumps(handed),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "100.0 0 single []\n"
