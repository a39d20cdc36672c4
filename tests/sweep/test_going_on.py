"""What a train task begins with: how much is left of its job, and an earlier run that does not stop."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from saturn_airflow import Cluster, HParams, Job, Node
from saturn_airflow.launch import restarting, runs
from saturn_airflow.model.definition import Definition
from saturn_airflow.model.entries import PlanEntry
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators.retrying import TryAgainError
from saturn_airflow.operators.round_train import RoundTrainOperator
from saturn_airflow.operators.train_task import TrainOperator

JOB = Job("a", load_model="m:f", load_dataloader="d:f", hparams=HParams(batches=20))


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AIRFLOW__SATURN__HOME", str(tmp_path))
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=0, try_number=2, max_tries=10)
    return {"ti": ti}


def operator_of(kind: type[TrainOperator], **fields: Any) -> TrainOperator:
    usual: dict[str, Any] = {"technique": "single", "devices": 1, "node": "n", "device_ids": (0,)}
    place: dict[str, Any] = {"start": 0.0, "end": 1.0, "kind": "cpu", "attempt": 200.0, "position": 0}
    entry = PlanEntry(job=JOB, fingerprint="f", **usual, **place, **fields)
    found = kind(
        task_id="t",
        entry=entry.to_dict(),
        node={"name": "n", "devices": 1, "kind": "cpu"},
        settings=SweepSettings(cluster=Cluster(Node("n", 1, kind="cpu")), group="s"),
    )
    found._decided = restarting.RestartDecision(Definition.of(JOB))
    return found


def ran(folder: Path, *said: dict[str, Any]) -> None:
    """A run of an earlier plan, with what it said."""
    path = folder / "sweeps" / "d" / "r" / "s" / "a" / "runs" / "0001"
    path.mkdir(parents=True)
    spec = runs.RunSpec(
        job=JOB, technique="single", folder="f", node="n", slots=1, devices=1, priority=(100.0, 0)
    )
    (path / "spec.json").write_text(json.dumps(spec.to_dict()))
    (path / "alive").touch()
    (path / "events.jsonl").write_text(
        "".join(json.dumps({**e, "time": e.get("time", 1.0)}) + "\n" for e in said)
    )


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"event": "step", "step": n, "epoch": 0, "seconds": 0.1, "loss": 1.0} for n in numbers]


def test_a_job_that_was_lost_at_its_rung_trains_to_it_again(context: Any, tmp_path: Path) -> None:
    """Steps that no checkpoint has are trained again: without them it would stop where it began, for ever."""
    operator = operator_of(RoundTrainOperator, round=1, most_batches=10)
    assert operator._spec(context).batch_count == 10
    saved = {"event": "checkpoint", "step": 6, "path": "p", "seconds": 1.0}
    ran(tmp_path, *steps(*range(1, 7)), saved, *steps(7, 8, 9, 10))
    assert operator._spec(context).batch_count == 4


def test_what_a_refused_strategy_saved_is_trained_again(context: Any, tmp_path: Path) -> None:
    operator = operator_of(RoundTrainOperator, round=1, most_batches=10)
    kept, aside = (
        {"event": "checkpoint", "step": step, "path": str(path), "seconds": 1.0, "time": float(step)}
        for step, path in ((3, tmp_path), (6, tmp_path / "aside"))
    )
    told = {"technique": "ddp", "devices": 2, "reason": "it differs", "status": "changes_result", "step": 7}
    ran(
        tmp_path,
        *steps(1, 2, 3),
        kept,
        *steps(4, 5, 6),
        aside,
        *steps(7),
        {"event": "refused", "time": 7.0, **told},
    )
    assert operator._spec(context).batch_count == 7


def test_a_task_that_must_go_while_an_earlier_run_stops_is_tried_again(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(tmp_path)
    operator = operator_of(TrainOperator)
    monkeypatch.setattr(runs.Run, "is_alive", lambda _: True)
    monkeypatch.setattr(runs.Run, "stop", lambda _: None)
    monkeypatch.setattr(TrainOperator, "_pass_on", lambda *_: None)
    monkeypatch.setattr(TrainOperator, "is_wanted", lambda *_: True)
    with pytest.raises(TryAgainError):
        operator.submit_job(context)


@pytest.mark.parametrize("occupied", [True, False])
def test_memory_that_others_filled_is_worth_one_of_its_tries(context: Any, occupied: bool) -> None:
    operator = operator_of(TrainOperator)
    end = {"status": "out_of_memory", "reason": "", **({"occupied": True} if occupied else {})}
    assert operator._is_worth_a_retry(context, end) is occupied


def test_a_job_that_takes_its_own_folder_away_is_not_tried_for_ever(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, int] = {}
    with_store: Any = {
        **context,
        "task_state_store": SimpleNamespace(get=kept.get, set=kept.__setitem__),
    }
    told: list[Any] = []
    monkeypatch.setattr(TrainOperator, "_push", lambda _, __, outcome: told.append(outcome))
    operator, gone = operator_of(TrainOperator), runs.Run(tmp_path / "gone")
    for _ in range(operator.settings.retries + 3):
        with pytest.raises(TryAgainError, match="goes on from what is left"):
            operator._ended(with_store, gone, {"reason": "taken away"})
    with pytest.raises(AirflowFailException, match="6 times by now: does the job's own code do it"):
        operator._ended(with_store, gone, {"reason": "taken away"})
    assert [outcome.status for outcome in told] == ["failed"]
    context["ti"].max_tries += 2000
    with pytest.raises(TryAgainError):  # somebody cleared it
        operator._ended(with_store, gone, {"reason": "taken away"})


def test_a_step_that_does_not_say_how_long_is_left_ends_no_round(context: Any, tmp_path: Path) -> None:
    """A technique of one's own may not know it, and a job's code may have written it."""
    operator = operator_of(RoundTrainOperator, round=1)
    assert isinstance(operator, RoundTrainOperator)
    operator._over_file = tmp_path / "over"
    for event in steps(*range(1, 21)):
        operator.watch(event)
    assert not operator._over_file.exists()
