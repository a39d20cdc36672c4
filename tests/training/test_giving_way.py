"""A run that leaves its devices to another sweep's goes on from its checkpoint, and ends as it would have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import leases, past_runs, progress, runs
from saturn_airflow.launch.giving_way import GivingWay
from saturn_airflow.launch.request import Measure
from saturn_airflow.launch.turn_at_node import Sharing
from saturn_airflow.model.claims import Claim, claim_of
from saturn_airflow.model.entries import Strategy
from saturn_airflow.model.sharing import SharedSweep

pytestmark = pytest.mark.ranks

SECONDS = {("single", 1): (4000.0, 1.0), ("ddp", 2): (2500.0, 1.0)}


def claim(
    sweep: str, made: float, seconds: dict[tuple[str, int], tuple[float, float]], preempt: bool
) -> Claim:
    facts = SharedSweep(sweep, (), arrived=made, alone=1e9, preempt=preempt)
    return claim_of(facts, f"{sweep}'s", next(iter(seconds))[0], seconds, made)


def losses(run: runs.Run) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.so_far() if event["event"] == "step"}


def test_it_gives_way_and_goes_on_under_another_strategy(tmp_path: Path) -> None:
    job = small_job("slow", batches=150)
    alone = runs.start(spec_for(tmp_path / "alone", job))
    long = spec_for(
        tmp_path / "long",
        job,
        "ddp",
        2,
        device_ids=(0, 1),
        leases_folder=str(tmp_path / "leases"),
        checkpoint_seconds=None,
        priority=(1.0, 0),
        claim=claim("a", 1.0, {("ddp", 2): SECONDS["ddp", 2], ("single", 1): SECONDS["single", 1]}, True),
        strategies=tuple(
            Strategy(technique=technique, devices=devices, verdict="exact", seconds=s, setup_seconds=setup)
            for (technique, devices), (s, setup) in SECONDS.items()
        ),
    )
    first = runs.start(long)
    for event in first.events():
        if event["event"] == "step" and event["step"] >= 5:
            break
    quick = {("ddp", 2): (10.0, 1.0)}
    second = runs.start(
        replace(
            long,
            folder=str(tmp_path / "quick"),
            job=small_job(batches=5),
            priority=(2.0, 0),
            claim=claim("b", 2.0, quick, False),
            strategies=(Strategy(technique="ddp", devices=2, verdict="exact"),),
        )
    )
    assert second.wait()["status"] == "finished"
    assert first.is_alive()
    end = first.wait()
    assert end["status"] == "finished", end
    happened = [event["event"] for event in first.so_far()]
    assert happened.count("gave_way") == 1
    assert happened.count("leased") == 2
    assert alone.wait()["status"] == "finished"
    assert losses(first) == pytest.approx(losses(alone), rel=1e-5)
    held = past_runs.time_on_devices(long.folder)
    assert held["actual_seconds"] < held["ended_at"] - held["started_at"]
    assert end["result"]["technique"] in ("ddp", "single")
    assert progress.of(long.folder).share == 1


@pytest.mark.parametrize("mode", ["train", "trial"])
def test_it_leaves_devices_that_another_got(mode: str, tmp_path: Path) -> None:
    """Training goes on elsewhere from its checkpoint; a trial measures anew, and not beside another."""
    folder, other = tmp_path / "leases", tmp_path / "copy"
    job = small_job("slow", batches=150)
    measure = Measure(least_seconds=1.0)
    run = runs.start(spec_for(tmp_path, job, mode=mode, measure=measure, checkpoint_seconds=None))
    for event in run.events():
        if event["event"] == "step":
            break
    with leases.acquire(["local-cpu0"], "another", folder=other):
        folder.rename(tmp_path / "before")
        other.rename(folder)
        assert run.wait()["status"] == "finished"
    said = run.so_far()
    (warning,) = [event["message"] for event in said if event["event"] == "warning"]
    assert f"replaced the folder of leases {folder}: another holds local-cpu0, too" in warning
    assert [event["devices"] for event in said if event["event"] == "leased"] == [[0], [1]]
    if mode == "train":
        assert [event["step"] for event in said if event["event"] == "step"] == list(range(1, 151))
    else:
        assert [event["event"] for event in said].count("launched") == 2


def test_what_a_refused_strategy_trained_is_still_to_be_trained(tmp_path: Path) -> None:
    facts = SharedSweep("a", (), arrived=0.0, alone=1e9)
    mine = claim_of(facts, "runs", "single", {("single", 1): (100.0, 2.0)}, made=1.0)
    with leases.acquire(["d0"], "runs", folder=tmp_path, sharing=Sharing(mine, ("d0",))) as lease:
        stay = GivingWay(Sharing(mine, ("d0",)), lease, tmp_path)
        step = {"event": "step", "epoch": 0, "seconds": 0.1, "loss": 1.0}
        start = {"event": "start", "total_batches": 100, "step": 0}
        for event in (start, {**step, "step": 60}):
            stay.note(event)
        assert stay.expected_seconds() == pytest.approx(2 + 0.6 * 98)
        for event in ({"event": "refused", "step": 60}, {**start, "step": 20}):
            stay.note(event)
        assert stay.expected_seconds() == pytest.approx(2 + 0.2 * 98)
