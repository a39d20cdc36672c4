"""Lines among a run's events that no supervisor has written are left out, and end nobody who reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import past_runs, progress, runs, whereabouts
from saturn_airflow.launch.supervisor import Supervisor
from saturn_airflow.operators.live import Live
from saturn_airflow.operators.progress_in_log import ProgressLog
from saturn_airflow.tracking.events import Recorder

STEP = {"event": "step", "step": 3, "epoch": 0, "loss": 0.5, "seconds": 0.1}
WHOLE: list[dict[str, Any]] = [
    {"event": "format", "format": 1},
    {"event": "leased", "devices": [0], "technique": "single"},
    {"event": "start", "step": 0, "total_batches": 9, "batches_per_epoch": 3, "checkpoint": None},
    STEP,
    {"event": "checkpoint", "step": 3, "path": "p", "seconds": 1.0},
    {"event": "end", "status": "stopped", "reason": "", "traceback": "", "result": {}},
]
FOREIGN: list[dict[str, Any]] = [
    {"event": "end"},
    {"event": "end", "status": "done"},
    {"event": "end", "status": "finished", "result": 7},
    {"event": "step", "loss": 0.5},
    {**STEP, "step": "4"},
    {**STEP, "step": 10**400},
    {**STEP, "loss": []},
    {"event": "start"},
    {"event": "start", "step": 0, "total_batches": "x"},
    {"event": "checkpoint", "step": 4},
    {"event": "eval", "step": 4, "epoch": 0, "metrics": {"f1": "high"}},
    {"event": "leased"},
    {"event": "waiting", "for": "me"},
    {"event": "warning"},
    {"event": "restarting"},
    {"event": "guard"},
    {"event": "looked"},
    {"event": "logged", "metrics": 3},
    {"event": "logged", "at": 3},
]


class _Log:
    def info(self, *words: Any) -> None:
        assert words[0] % words[1:]

    warning = error = info


def _heard(folder: Path, events: list[dict[str, Any]]) -> list[Any]:
    """What those who read the events of a job make of them."""
    run = folder / "runs" / "0001"
    run.mkdir(parents=True)
    (run / "spec.json").write_text(json.dumps(spec_for(folder, small_job()).to_dict()))
    (run / "alive").touch()
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    live, log, recorder = Live(print, {}), ProgressLog(_Log(), "here"), Recorder()
    told = list(runs.Run(run).events())
    live.hear(told)
    for event in told:
        log.tell(event)
        recorder.records(event)
    found = progress.of(folder)
    held, saved = past_runs.time_on_devices(folder), past_runs.last_checkpoint(folder)
    return [told, found.steps, found.status, live.told()["now"], held, saved, whereabouts.of(folder)]


@pytest.mark.parametrize("timed", [True, False], ids=["at a time", "at none"])
def test_what_lacks_a_field_is_left_out(timed: bool, tmp_path: Path) -> None:
    whole = [{**event, "time": float(number)} for number, event in enumerate(WHOLE)]
    wanted = _heard(tmp_path / "whole", whole)
    assert wanted[1:3] == [3, "stopped"]
    foreign = [{**event, "time": 3.0} for event in FOREIGN] if timed else [*FOREIGN, *WHOLE]
    for number, event in enumerate(foreign):
        assert _heard(tmp_path / str(number), [*whole[:4], event, *whole[4:]]) == wanted, event


def test_another_format_is_one_only_where_the_file_begins(tmp_path: Path) -> None:
    whole = [{**event, "time": float(number)} for number, event in enumerate(WHOLE)]
    newer = {"event": "format", "format": 999, "written_by": "saturn-airflow 99"}
    assert _heard(tmp_path, [*whole[:4], newer, *whole[4:]])[1] == 3


def test_half_a_line_of_others_swallows_nothing_that_is_said_after_it(tmp_path: Path) -> None:
    """Else a job whose code has written there would count as lost at its end."""
    (tmp_path / "spec.json").write_text(json.dumps(spec_for(tmp_path, small_job()).to_dict()))
    (tmp_path / "alive").touch()
    supervisor = Supervisor(tmp_path, None)
    supervisor.emit(STEP)
    for text in ("half a line", "a whole one\n", "{"):
        with open(tmp_path / "events.jsonl", "a") as file:
            file.write(text)
        supervisor.emit({**STEP, "step": 4})
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write("once more")
    supervisor.emit(WHOLE[-1])
    told = list(runs.Run(tmp_path).events())
    assert [event.get("step") for event in told] == [3, 4, 4, 4, None]
    assert told[-1]["status"] == "stopped"
