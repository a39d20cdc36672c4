"""The ledger of active sweeps, and ``saturn why``, with real runs."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from running import small_job, spec_for

from saturn_airflow.cli import main
from saturn_airflow.launch import progress, runs, whereabouts
from saturn_airflow.launch.ledger import Ledger
from saturn_airflow.launch.rest_of_sweep import RestOfSweep
from saturn_airflow.model.active_sweep import ActiveSweep
from saturn_airflow.model.claims import claim_of
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.folders import OF_SWEEPS, slug
from saturn_airflow.model.plan import Place
from saturn_airflow.model.problem import Option, PlannedJob
from saturn_airflow.model.sharing import Pace, SharedJob, SharedSweep, SharingRules
from saturn_airflow.planning.online.error_law import ErrorLaw, Parts
from saturn_airflow.sharing.forecast import plan_together

NODE = Node("local", 2, "cpu")


def active(dag: str, *jobs: str, made: float = 1.0, **facts: object) -> ActiveSweep:
    options = (Option("single", 1, {"cpu": 500.0}, 2.0), Option("ddp", 2, {"cpu": 300.0}, 2.0))
    planned = tuple(SharedJob(PlannedJob(job, options, ("local",))) for job in jobs)
    own: dict[str, object] = {"arrived": time.time(), "alone": 100.0, **facts}
    return ActiveSweep(
        dag_id=dag,
        run_id="run",
        folder=f"sweeps/{dag}/run/sweep",
        made=made,
        nodes=(NODE,),
        sweep=SharedSweep(f"{dag}/run/sweep", planned, **own),  # type: ignore[arg-type]
    )


def test_why_names_who_breaks_a_deadline_and_whose_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(active("due", "a", "b", deadline=time.time() + 700))
    assert main(["why", "due", "--home", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["late"], found["broken_by"], found["breaks"]) == (False, {}, [])
    ledger.write(active("urgent", "c", "d", priority=5.0, made=2.0))
    assert main(["why", "due", "--home", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["late"]
    assert found["broken_by"]["urgent/run/sweep"] < found["deadline"] < found["end"]
    assert main(["why", "due", "--home", str(tmp_path)]) == 0
    assert "without urgent/run/sweep it would be done at" in capsys.readouterr().out
    assert main(["why", "urgent", "--home", str(tmp_path)]) == 0
    assert (
        "it breaks the deadline of due/run/sweep, which would be kept without it" in capsys.readouterr().out
    )
    assert main(["why", "--home", str(tmp_path)]) == 0
    assert ", missed" in capsys.readouterr().out
    assert main(["why", "due", "--home", str(tmp_path), "--run", "run"]) == 0
    assert main(["why", "due", "--home", str(tmp_path), "--run", "other"]) == 2
    assert "no sweep of 'due' in the run 'other'" in capsys.readouterr().err


def test_why_says_the_end_with_odds_where_the_law_of_errors_was_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ErrorLaw((Parts(1.0, 0.0, 0.0, 0.0),))
    ledger = Ledger(tmp_path)
    ledger.write(replace(active("nightly", "a"), law=late.to_dict()))
    ledger.write(active("other", "b", made=2.0))
    assert main(["why", "nightly", "--home", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    now = time.time()
    assert found["promised"]["odds"] == 0.9
    # Its training takes e times as long as is expected.
    assert found["promised"]["by"] - now > 1.8 * (found["end"] - now)
    assert main(["why", "nightly", "--home", str(tmp_path)]) == 0
    assert ", with 90% by " in capsys.readouterr().out
    assert main(["why", "other", "--home", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["promised"] is None
    for damaged in ({}, {**late.to_dict(), "possible": []}, {**late.to_dict(), "gaps": [math.nan]}):
        ledger.write(replace(active("nightly", "a"), law=damaged))
        assert main(["why", "nightly", "--home", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["promised"] is None


def folder_of(home: Path, sweep: ActiveSweep, job: str) -> Path:
    return home / sweep.folder / slug(job, OF_SWEEPS)


def test_what_was_written_is_read_until_it_ends(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.sweeps() == []
    late, early = active("late", "a", made=2.0), active("early", "b", made=1.0)
    ledger.write(late)
    ledger.write(early)
    assert ledger.sweeps() == [early, late]
    again = replace(early, made=3.0)
    ledger.write(again)
    assert ledger.sweeps() == [late, again]
    ledger.remove(late.key)
    ledger.remove(late.key)
    assert ledger.sweeps() == [again]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"format": 1', '"format": 9'),
        lambda text: text.replace('"devices": 2', '"devices": -2'),
        lambda text: text.replace('"seconds": {', '"seconds": 7, "x": {'),
        lambda text: text.replace('"keeps": null', '"keeps": []'),
        lambda text: text.replace('"keeps": null', '"keeps": 7'),
        lambda text: text.replace('"asks": 0.0', '"asks": "soon"'),
        lambda text: text.replace('"technique": "ddp", "devices": 2', '"technique": "ddp", "devices": "2"'),
        lambda text: text.replace('{"cpu": 300.0}', '{"cpu": null}'),
        lambda text: text.replace('"setup": 2.0', '"setup": "2"'),
        lambda text: text.replace('"setup": 2.0', f'"setup": 1{400 * "0"}'),
        lambda text: "",
    ],
)
def test_what_is_damaged_is_left_out_with_a_warning_and_stays(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(active("bad", "a"))
    (path,) = (tmp_path / "sweeps" / ".active").iterdir()
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    ledger.write(active("good", "a"))
    assert [sweep.dag_id for sweep in ledger.sweeps()] == ["good"]
    assert str(path) in caplog.text
    assert path.exists()
    assert main(["why", "--home", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "spec.json").write_text("{"),
        lambda run: (run / "spec.json").unlink(),
        lambda run: (run / "spec.json").write_text('{"format": 99, "written_by": "9.0"}'),
    ],
)
def test_a_job_whose_folder_can_not_be_read_ends_no_plan_of_others(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    bad, good = active("bad", "damaged"), active("good", "a", made=2.0)
    ledger.write(bad)
    ledger.write(good)
    run = folder_of(tmp_path, bad, "damaged") / "runs" / "1"
    run.mkdir(parents=True)
    (run / "spec.json").write_text(json.dumps(spec_for(tmp_path, small_job()).to_dict()))
    leased = {"event": "leased", "devices": [0], "technique": "single", "time": time.time()}
    (run / "events.jsonl").write_text(json.dumps(leased) + "\n")
    with open(run / "alive", "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        damage(run)
        for _ in range(2):
            cluster = ledger.cluster(ledger.sweeps())
            assert [(job.name, job.left) for one in cluster.sweeps for job in one.jobs] == [
                ("damaged", 1.0),
                ("a", 1.0),
            ]
        rest = RestOfSweep(str(tmp_path), bad.key)
        rest.see([])
        own = claim_of(bad.sweep, "other", "single", {("single", 1): (100.0, 2.0)}, 1.0)
        assert rest.put_in(own).sweep.elsewhere == 500.0
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"how far damaged of {bad.key} is can't be read, and it counts as not begun: ")
    assert main(["why", "good", "--home", str(tmp_path)]) == 0


def test_a_job_of_a_round_waits_for_the_strategy_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others expect nothing else of it; who looks whether to plan it anew does."""
    sweep = active("rounds", "waits")
    kept = replace(sweep, sweep=replace(sweep.sweep, jobs=(replace(sweep.sweep.jobs[0], keeps=("ddp", 2)),)))
    ledger = Ledger(tmp_path)
    ledger.write(kept)
    assert ledger.sweeps() == [kept]

    def strategies(whole: str | None = None) -> list[str]:
        (job,) = ledger.cluster(ledger.sweeps(), whole=whole).sweeps[0].jobs
        return [option.technique for option in job.job.options]

    assert (strategies(), strategies(kept.key)) == (["ddp"], ["single", "ddp"])
    # Where it runs under that of an earlier round, that is what it has.
    here = whereabouts.Whereabouts(place=Place("single", 1, "local", (0,)), since=time.time())
    monkeypatch.setattr(whereabouts, "of", lambda folder: here)
    assert strategies() == ["single", "ddp"]


@pytest.mark.parametrize("said", [Node("local", 1, "cpu"), Node("local", 2, "gpu")])
def test_sweeps_may_differ_in_what_they_say_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Node
) -> None:
    """A job on a device, or of a kind, that the other's node does not have must not end the other's plan."""
    place = Place("ddp", 2, "local", (0, 1))
    here = whereabouts.Whereabouts(share=0.5, place=place, since=time.time() - 100)
    monkeypatch.setattr(whereabouts, "of", lambda folder: here)
    ledger = Ledger(tmp_path)
    ledger.write(active("long", "runs"))
    cluster = ledger.cluster(ledger.sweeps(), (said,))
    assert cluster.nodes == (said,)
    assert cluster.sweeps[0].jobs[0].place is None
    assert cluster.busy["local", 0] > cluster.now
    plan_together(cluster, SharingRules())


@pytest.mark.ranks
def test_where_jobs_are_is_what_their_runs_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    sweep, other = active("long", "runs", "done", "waits"), active("short", "urgent", priority=5.0)
    ledger = Ledger(home)
    for one in (sweep, other):
        ledger.write(one)
    done = replace(spec_for(tmp_path, small_job(batches=3)), folder=str(folder_of(home, sweep, "done")))
    assert runs.start(done).wait()["status"] == "finished"
    spec = spec_for(tmp_path, small_job("slow", batches=400), "ddp", 2)
    run = runs.start(replace(spec, folder=str(folder_of(home, sweep, "runs"))))
    for event in run.events():
        if event["event"] == "step" and event["step"] >= 5:
            break
    cluster = ledger.cluster(ledger.sweeps())
    by_job = {job.name: job for one in cluster.sweeps for job in one.jobs}
    assert sorted(by_job) == ["runs", "urgent", "waits"]
    assert by_job["runs"].place == Place("ddp", 2, "local", (0, 1))
    assert 0.5 < by_job["runs"].left < 1
    assert (by_job["waits"].place, by_job["waits"].left) == (None, 1.0)

    assert main(["why", "short", "--home", str(home), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    (urgent,) = told["jobs"]
    assert [holder["job"] for holder in urgent["waits_for"]] == ["runs"]
    assert urgent["start"] > time.time() + 60
    assert told["before"] == {}
    assert main(["why", "long", "waits", "--home", str(home)]) == 0
    said = capsys.readouterr().out
    assert "waits waits for local: " in said
    assert "held by runs until" in said
    assert "short/run/sweep goes before it: its priority is 5, and 0 here" in said
    assert main(["why", "--home", str(home)]) == 0
    assert "long/run/sweep" in capsys.readouterr().out
    folder = folder_of(home, sweep, "runs")
    assert whereabouts.of(folder).share == pytest.approx(progress.of(folder).share, abs=0.05)
    run.stop()
    assert whereabouts.of(folder).share == progress.of(folder).share
    (state,) = (job for one in ledger.cluster([sweep]).sweeps for job in one.jobs if job.name == "runs")
    assert state.place is None
    assert state.left < 1


def test_where_a_job_is_is_what_was_said_last(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    spec = spec_for(tmp_path, small_job(), "ddp", 2)
    (folder / "spec.json").write_text(json.dumps(spec.to_dict()))
    lines: list[str] = []

    def say(event: str, **fields: object) -> whereabouts.Whereabouts:
        lines.append(json.dumps({"event": event, **fields, "time": float(len(lines))}) + "\n")
        (folder / "events.jsonl").write_text("".join(lines))
        return whereabouts.of(tmp_path)

    with open(folder / "alive", "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        assert say("leased", devices=[0], technique="ddp").place == Place("ddp", 1, "local", (0,))
        lines.clear()  # aa7f206 wrote no line with the format
        assert say("format", format=1) == whereabouts.Whereabouts()
        first = say("leased", devices=[0, 1], technique="ddp")
        assert (first.place, first.since, first.share) == (Place("ddp", 2, "local", (0, 1)), 1.0, 0.0)
        say("start", step=0, total_batches=50, batches_per_epoch=50)
        assert say("step", step=5, seconds=0.1, epoch=0, loss=1.0).share == 0.1
        assert say("step", step=5, seconds=0.5, epoch=0, loss=1.0).leaves_in is None
        assert whereabouts.of(tmp_path).pace is None, "one step tells nothing"
        assert say("step", step=5, seconds=0.5, epoch=0, loss=1.0).pace is None
        assert say("step", step=6, seconds=0.5, epoch=1, loss=1.0).pace == Pace(0.02, 3.0, True)
        assert say("checkpoint", step=5, path="p", seconds=2.0).leaves_in == 3.5, (
            "a step, the checkpoint, and the end"
        )
        assert say("gave_way", seconds=2.75).place is None
        assert say("leased", devices=[1], technique="single").place == Place("single", 1, "local", (1,))
        say("start", step=5, total_batches=50, batches_per_epoch=50)
        say("logged", text='\n{"event": "step", "step": 40}')
        assert say("checkpoint", step=5, path="p", seconds=9.0).leaves_in == 2.75, "what it once took"
        now = say("step", step=6, seconds=0.1, epoch=0, loss=1.0)
        assert now.pace is None, "what came before it gave way is of another stay"
        assert (now.share, now.place and now.place.devices) == (0.12, 1)
        assert now.share == progress.of(tmp_path).share
        with open(folder / "events.jsonl", "a") as file:
            file.write('{"event": "step", "st')
        assert whereabouts.of(tmp_path) == now


def test_a_node_whose_clock_is_ahead_is_not_taken_to_set_up_for_as_long(tmp_path: Path) -> None:
    sweep = active("a", "runs")
    folder = folder_of(tmp_path, sweep, "runs") / "runs" / "1"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec_for(tmp_path, small_job()).to_dict()))
    said = ({"event": "format", "format": 1}, {"event": "leased", "devices": [0], "technique": "single"})
    told = ({**event, "time": time.time() + 3600.0} for event in said)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    with open(folder / "alive", "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        (found,) = Ledger(tmp_path).cluster([sweep]).sweeps
    assert found.jobs[0].place == Place("single", 1, "local", (0,))
    assert found.jobs[0].setting_up == 2.0


def test_where_a_job_is_does_not_depend_on_a_clock_that_is_set_meanwhile(tmp_path: Path) -> None:
    """It was told an hour back as the job had left its devices, and two forth as it trained again."""
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(spec_for(tmp_path, small_job(), "ddp", 2).to_dict()))
    start = {"event": "start", "step": 0, "total_batches": 50, "batches_per_epoch": 50}
    step = {"event": "step", "seconds": 0.1, "epoch": 0, "loss": 1.0}
    said: list[tuple[dict[str, object], float]] = [
        ({"event": "leased", "devices": [0, 1], "technique": "ddp"}, 5000.0),
        (start, 5001.0),
        ({**step, "step": 1}, 5002.0),
        ({"event": "gave_way", "seconds": 2.0}, 5003.0),
        ({"event": "leased", "devices": [1], "technique": "single"}, 1404.0),
        ({**start, "step": 1}, 1405.0),
        ({**step, "step": 2}, 1406.0),
        ({**step, "step": 3}, 8607.0),
    ]
    told: list[dict[str, object]] = [{"event": "format", "format": 1, "time": 0.0}]
    told += [{**event, "time": at, "clock": float(n)} for n, (event, at) in enumerate(said)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    with open(folder / "alive", "w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        now = whereabouts.of(tmp_path)
    assert now.place == Place("single", 1, "local", (1,))
    assert now.pace == Pace(0.02, 1.0, False)


@pytest.mark.slow
def test_a_planner_that_is_killed_while_it_writes_leaves_what_was_there(tmp_path: Path) -> None:
    jobs = [f"job-{number}" for number in range(400)]
    ledger, sweep = Ledger(tmp_path), active("nightly", *jobs)
    ledger.write(sweep)
    begun = multiprocessing.get_context("fork")
    for number in range(12):
        planner = begun.Process(target=_plan_again_and_again, args=(tmp_path, sweep))
        planner.start()
        time.sleep(0.02 + 0.01 * number)
        planner.kill()
        planner.join()
        (found,) = ledger.sweeps()
        assert [job.name for job in found.sweep.jobs] == jobs
    again = replace(sweep, made=1e9)
    ledger.write(again)
    assert ledger.sweeps() == [again]


def _plan_again_and_again(home: Path, sweep: ActiveSweep) -> None:
    made = 2.0
    while True:
        Ledger(home).write(replace(sweep, made=made))
        made += 1


@pytest.mark.slow
def test_a_job_that_has_failed_for_good_does_not_wait(tmp_path: Path) -> None:
    sweep = active("nightly", "broken", "waits")
    state = folder_of(tmp_path, sweep, "broken")
    failing = replace(small_job(), loss_function="no.such.module:loss")
    run = runs.start(replace(spec_for(tmp_path, failing), folder=str(state)))
    assert run.wait()["status"] == "failed"

    def waiting() -> list[str]:
        return [job.name for one in Ledger(tmp_path).cluster([sweep]).sweeps for job in one.jobs]

    assert waiting() == ["broken", "waits"], "another try may come"
    run.give_up()
    assert waiting() == ["waits"]
    again = runs.start(replace(spec_for(tmp_path, failing), folder=str(state)))
    assert again.wait()["status"] == "failed"
    assert waiting() == ["broken", "waits"], "a user has cleared its task"


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--home", str(tmp_path)]) == 0
    assert "No sweep is planned and not done" in capsys.readouterr().out
    assert main(["why", "nightly", "--home", str(tmp_path)]) == 2
    assert "there is no active sweep" in capsys.readouterr().err
    Ledger(tmp_path).write(active("other", "a"))
    assert main(["why", "nightly", "--home", str(tmp_path)]) == 2
    assert "active are other (run)" in capsys.readouterr().err
    assert main(["why", "other", "b", "--home", str(tmp_path)]) == 2
    assert "no job of 'other' that is not done is called 'b'" in capsys.readouterr().err
