"""A strategy that is refused once training has begun: the job goes on under another of its strategies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import changing_late
import coupled_late
import pytest
import torch
from running import small_job, spec_for
from test_late_changes import EPOCHS, job

from saturn_airflow import Job
from saturn_airflow.launch import event_file, failures, leases, past_runs, progress, runs
from saturn_airflow.launch.giving_way import TurnsOfRun
from saturn_airflow.model import guards
from saturn_airflow.model.claims import HERE
from saturn_airflow.model.entries import Strategy
from saturn_airflow.model.plan import Place

pytestmark = pytest.mark.ranks
OTHERS = (
    Strategy(technique="ddp", devices=2, verdict="exact", seconds=10.0),
    Strategy(technique="single", devices=1, verdict="exact", seconds=20.0),
    Strategy(technique="single", devices=4, verdict="exact", seconds=1.0),
)


def start(folder: Path, one: Job, strategies: tuple[Strategy, ...] = OTHERS, **changes: Any) -> runs.Run:
    """A run of two devices under ``ddp``."""
    path = (str(Path(__file__).parent), *spec_for(folder, one).path)
    return runs.start(spec_for(folder, one, "ddp", 2, path=path, strategies=strategies, **changes))


def end_of(folder: Path, one: Job, *strategies: Any, **changes: Any) -> tuple[runs.Run, dict[str, Any]]:
    """Such a run, and how it ends."""
    run = start(folder, one, *strategies, **changes)
    return run, run.wait()


def test_a_job_goes_on_under_another_strategy_from_before_what_was_refused(tmp_path: Path) -> None:
    run, end = end_of(tmp_path, job("hook"))
    assert end["status"] == "finished", end["reason"]
    result = end["result"]
    assert (result["technique"], result["devices"], result["device_ids"]) == ("single", 1, [0])
    (refusal,) = past_runs.result_of(run.spec.folder, end)["refusals"]
    assert (refusal["technique"], refusal["devices"], refusal["status"]) == ("ddp", 2, "changes_result")
    assert "Training has changed the hooks of first" in refusal["reason"]
    losses = {event["step"]: event["loss"] for event in event_file.every(run.folder, "step")}
    expected = changing_late.plain_losses("hook", EPOCHS)
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, rel=1e-12)
    (told,) = (w["message"] for w in event_file.every(run.folder, "warning") if "is refused" in w["message"])
    assert told.startswith("ddp x 2 is refused (")
    assert told.endswith("training goes on under single x 1")
    assert [e["technique"] for e in event_file.every(run.folder, "leased")] == ["ddp", "single"]
    assert {speed.technique for speed in progress.of(run.spec.folder).speeds} <= {"single"}
    first, *_, last = (e["clock"] for e in run.so_far() if e["event"] in ("leased", "launched"))
    held = past_runs.time_on_devices(run.spec.folder)
    assert held["before_seconds"] == pytest.approx(last - first)
    assert held["before_seconds"] < held["actual_seconds"]


def test_what_is_not_exact_is_no_refusal_for_others(tmp_path: Path) -> None:
    exact = Job.from_dict({**small_job(batches=3).to_dict(), "exact": True})
    run, end = end_of(tmp_path, exact, verdict="distribution")
    assert (end["status"], end["result"]["technique"]) == ("finished", "single")
    assert [refused["status"] for refused in event_file.every(run.folder, "refused")] == ["does_not_fit"]


def test_what_is_refused_as_it_stops_goes_on_under_another_strategy_the_next_time(tmp_path: Path) -> None:
    coupled = dataclasses.replace(job(""), load_model="coupled_late:CoupledLate", model_args={})
    coupled = dataclasses.replace(coupled, hparams=dataclasses.replace(coupled.hparams, epochs=400))
    run = start(tmp_path, coupled)
    for event in run.events():
        if event["event"] == "step" and event["step"] > coupled_late.AT:
            run.ask_to_stop()
            break
    assert run.wait()["status"] == "stopped"
    (refusal,) = progress.of(run.spec.folder).refusals
    assert refusal.technique == "ddp"
    later, end = end_of(tmp_path, coupled, batch_count=3)
    assert (end["status"], end["result"]["technique"]) == ("stopped", "single")
    (begun,) = event_file.every(later.folder, "start")
    assert end["result"]["steps"] == begun["step"] + 3 < coupled_late.AT


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({"ddp": 8, "fsdp": 4, "pipeline": 3, "single": 2}, ["fsdp", "single"]),
        ({"ddp": 8, "fsdp": 8, "pipeline": 0, "single": 9}, []),
        ({}, []),
    ],
)
def test_where_memory_ran_out_a_job_goes_on_under_what_took_less(
    tmp_path: Path, peaks: dict[str, int], expected: list[str]
) -> None:
    fastest_first = (("ddp", 2), ("fsdp", 2), ("single", 1), ("pipeline", 2))
    strategies = tuple(
        Strategy(technique=name, devices=n, seconds=float(place), peak_device_bytes=peaks.get(name, 0))
        for place, (name, n) in enumerate(fastest_first)
    )
    turn = TurnsOfRun(spec_for(tmp_path, small_job(), "ddp", 2, strategies=strategies), ("n0", "n1"))
    turn.device_ids = (0, 1)
    killed = failures.of_a_death(0, -9, True)
    told = list[dict[str, Any]]()
    assert not turn.goes_on_after(killed, told.append), "that was the machine's memory"
    ran_out = failures.describe(torch.OutOfMemoryError("CUDA out of memory"))
    seen = []
    while turn.goes_on_after(ran_out, told.append):
        seen.append(turn.spec.technique)
    assert seen == expected
    assert [event["event"] for event in told] == [
        *["refused", "warning", "leased"] * len(expected),
        "refused",
    ]
    assert all("ran out of memory (" in event["message"] for event in told[1::3])
    assert all(event["step"] is None for event in told[::3]), "what it trained counts"


@pytest.mark.parametrize("occupied", [False, True])
def test_where_memory_ran_out_the_next_run_begins_under_what_took_less(
    tmp_path: Path, occupied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that had gone on under it may have been told to stop."""
    strategies = tuple(
        Strategy(technique=name, devices=n, seconds=1.0, peak_device_bytes=peak, parameters={"n": peak})
        for name, n, peak in (("ddp", 2, 8), ("fsdp", 2, 4), ("single", 1, 2))
    )
    spec = spec_for(tmp_path, small_job(), "ddp", 2, strategies=strategies, parameters={"n": 8})
    said = list[dict[str, Any]]([{"event": "format", "time": 1.0}])
    first = TurnsOfRun(spec, ("n0", "n1"))
    first.device_ids = (0, 1)
    ran_out = failures.describe(torch.OutOfMemoryError("CUDA out of memory"))
    assert first.goes_on_after(ran_out, said.append, occupied)
    run = Path(spec.folder) / "runs" / "0001"
    run.mkdir(parents=True)
    (run / "alive").touch()
    (run / event_file.NAME).write_text("".join(json.dumps({**e, "time": 1.0}) + "\n" for e in said))
    later = TurnsOfRun(spec, ("n0", "n1"))
    began = "ddp" if occupied else "fsdp"  # what others filled may be free by then
    assert (later.spec.technique, later.spec.devices) == (began, 2)
    assert bool(later.result()) is not occupied
    with leases.acquire(["n0", "n1"], "it", folder=tmp_path / "leases") as lease:
        assert later.begin(lease, tmp_path / "leases")["technique"] == began
        lease.place = Place("ddp", 2, HERE, (0, 1))  # those beside it count with the planned one
        assert later.begin(lease, tmp_path / "leases")["technique"] == began
    otherwise = dataclasses.replace(spec, parameters={"n": 7})
    assert TurnsOfRun(otherwise, ("n0", "n1")).spec.technique == "ddp"
    alone = dataclasses.replace(spec, strategies=strategies[:1])
    assert TurnsOfRun(alone, ("n0", "n1")).spec == alone
    measured = dataclasses.replace(spec, mode="trial")
    assert TurnsOfRun(measured, ("n0", "n1")).spec == measured
    monkeypatch.setattr(guards, "own_code", lambda job: "mended")
    assert TurnsOfRun(spec, ("n0", "n1")).spec.technique == "ddp", "its code was mended since"


def test_a_job_without_another_strategy_ends(tmp_path: Path) -> None:
    _, end = end_of(tmp_path, job("hook"), OTHERS[::2])
    assert end["status"] == "changes_result"
