"""Techniques of one's own that train by a loop of their own: stopped, in parts, and what is said of them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from running import USERLAND, small_job, spec_for
from safetensors.torch import load_file

from saturn_airflow.launch import progress, runs
from saturn_airflow.launch.emitted import ReportedResult
from saturn_airflow.launch.own_training import result_of
from saturn_airflow.launch.runs import RunSpec
from saturn_airflow.operators.round_train import RoundTrainOperator

pytestmark = pytest.mark.ranks


def finish(spec: RunSpec) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    events = list(runs.start(spec).events(poll=0.02))
    return events[-1], events


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def by_hand(folder: Path, loss: str = "squared", devices: int = 2, **settings: Any) -> RunSpec:
    # Two epochs of ten batches.
    job = small_job(loss, data_args={"samples": 80}, batches=None, epochs=2)
    return spec_for(folder, job, "by_hand", devices, verdict="not checked", **settings)


def test_ranks_that_were_told_to_stop_have_not_finished_the_job(tmp_path: Path) -> None:
    spec = by_hand(tmp_path, "slow")
    run = runs.start(spec)
    for event in run.events(poll=0.02):
        if event["event"] == "step" and event["step"] == 3:
            run.stop()
    stopped = run.end
    assert stopped is not None
    assert (stopped["status"], stopped["reason"]) == ("stopped", "")
    assert 3 <= stopped["result"]["steps"] < 20
    assert "model" not in stopped["result"]
    ended, events = finish(spec)
    assert ended["status"] == "finished"
    assert list(losses(events)) == list(range(stopped["result"]["steps"] + 1, 21))


@pytest.mark.parametrize("known", [True, False])
def test_a_job_that_was_trained_for_some_batches_has_not_finished(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SATURN_TECHNIQUES_FOLDER", str(USERLAND / "techniques"))
    straight, _ = finish(by_hand(tmp_path / "straight"))
    total: dict[str, Any] = {"total_batches": 20, "batches_per_epoch": 10} if known else {}
    came_to = []
    for batches in (7, 6):
        ended, events = finish(by_hand(tmp_path, batch_count=batches, **total))
        came_to.append(ended["result"]["steps"])
        assert (ended["status"], "model" in ended["result"]) == ("stopped", False)
        assert not [event for event in events if event["event"] == "warning"]
        assert RoundTrainOperator._batches_before(by_hand(tmp_path)) == came_to[-1]
    assert came_to == [7, 13]
    ended, events = finish(by_hand(tmp_path, batch_count=0, **total))
    assert (ended["status"], ended["result"]["steps"], losses(events)) == ("stopped", 13, {})
    so_far = progress.of(tmp_path / "state")
    assert (so_far.share, [*so_far.history]) == ((13 / 20, ["epoch_loss"]) if known else (0.0, []))
    ended, events = finish(by_hand(tmp_path, batch_count=7, **total) if known else by_hand(tmp_path))
    assert ended["status"] == "finished"
    for name in ("steps", "loss", "epoch_loss"):
        assert ended["result"][name] == straight["result"][name], name
    assert len(losses(events)) == 7
    weights = [load_file(Path(end["result"]["model"], "model.safetensors")) for end in (straight, ended)]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])


def test_what_a_run_told_in_earlier_turns_at_its_devices_counts(tmp_path: Path) -> None:
    """Each turn begins with nothing told."""
    spec = by_hand(tmp_path)
    ended, _ = finish(spec)
    told = ReportedResult()
    told.add({"event": "step", "step": 20, "epoch": 1, "loss": ended["result"]["loss"]})
    found = result_of({"status": "finished"}, told, spec)
    assert found["epoch_loss"] == ended["result"]["epoch_loss"] != ended["result"]["loss"]


def test_a_run_that_found_nothing_left_to_train_has_the_result_of_the_job(tmp_path: Path) -> None:
    first, _ = finish(by_hand(tmp_path))
    again, events = finish(by_hand(tmp_path))
    assert losses(events) == {}
    for name in ("status", "steps", "loss", "epoch_loss"):
        assert {**again, **again["result"]}[name] == {**first, **first["result"]}[name]


def test_a_model_of_an_earlier_run_is_not_that_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "state" / "model").mkdir(parents=True)
    ended, events = finish(by_hand(tmp_path, parameters={"exports": False}))
    assert (ended["status"], "model" in ended["result"]) == ("finished", False)
    assert any("left no model" in event["message"] for event in events if event["event"] == "warning")


def test_a_trial_counts_the_batches_of_an_epoch_for_a_search_that_does_not(tmp_path: Path) -> None:
    ended, _ = finish(by_hand(tmp_path, mode="trial"))
    assert ended["status"] == "finished", ended
    assert (ended["result"]["seconds_per_batch"], ended["result"]["batches_per_epoch"]) == (0.5, 10)


def test_what_is_told_once_more_counts_once() -> None:
    told, earlier = ReportedResult(), ReportedResult()

    def steps(to: ReportedResult, *numbers: int, loss: float) -> None:
        for number in numbers:
            to.add({"event": "step", "step": number, "epoch": number // 4, "loss": loss})

    steps(earlier, 1, 2, 3, 4, 5, 6, loss=8.0)
    steps(earlier, 4, 5, 6, 7, loss=4.0)  # killed, and gone on from the third
    assert earlier.result()["epoch_loss"] == 4.0
    steps(told, 6, 7, loss=2.0)
    told.go_on_from(earlier)
    found = told.result()
    assert (found["steps"], found["loss"], found["epoch_loss"], found["batches"]) == (7, 2.0, 3.0, 2)


def test_a_technique_that_was_edited_since_it_was_compared_is_compared_anew(tmp_path: Path) -> None:
    techniques = tmp_path / "techniques"
    techniques.mkdir()
    (techniques / "edited.py").write_text(
        textwrap.dedent("""
            from torch.nn.parallel import DistributedDataParallel

            from saturn_airflow import BaseTechnique


            class Edited(BaseTechnique):
                def parallelize(self, model, ranks, **parameters):
                    for parameter in model.parameters():
                        parameter.register_hook(lambda gradient: 1.5 * gradient)
                    return DistributedDataParallel(model)
        """)
    )
    compared: dict[str, Any] = {"verdict": "exact", "version": "1 0f1e2d3c"}
    spec = spec_for(tmp_path, small_job(), "edited", 2, technique_folders=(str(techniques),), **compared)
    ended, events = finish(spec)
    told = [event["message"] for event in events if event["event"] == "warning"]
    assert any("technique 'edited' is another than when this was planned" in message for message in told)
    assert (ended["status"], losses(events)) == ("changes_result", {}), "nothing was trained under it"


def test_processes_in_fresh_interpreters_find_what_the_file_of_the_technique_defines(tmp_path: Path) -> None:
    ended, events = finish(spec_for(tmp_path, small_job(), "spawning", verdict="not checked"))
    assert (ended["status"], losses(events)) == ("finished", {1: 6.0}), ended
    assert (tmp_path / "state" / "spawned-0").exists()
