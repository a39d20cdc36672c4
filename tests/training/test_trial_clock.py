"""How long a trial's measurement may take, by a clock that is set by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.launch.trial_clock import TrialClock
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import loop
from saturn_airflow.training.ranks import Ranks

GIB = 2**30


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be changed."""
    found = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: found[0])
    return found


@pytest.mark.parametrize(("gib", "set_up", "measured"), [(0.0, 300, 60), (0.5, 320, 61), (24.0, 1260, 108)])
def test_a_larger_model_may_take_longer(gib: float, set_up: int, measured: int, now: list[float]) -> None:
    clock = TrialClock(60.0)
    now[0] += 10
    clock.loaded(int(gib * GIB))
    now[0] = 1000 + set_up
    assert clock.too_late() is None
    now[0] += 1
    assert clock.too_late() == f"its first batch was not done within {set_up} s"
    # What comes before, and what only a large model may take, is not the trial's.
    assert clock.stepped() == pytest.approx(set_up + 1 + measured - 60)
    assert clock.stepped() == 0.0
    now[0] += measured
    assert clock.too_late() is None
    now[0] += 1
    assert clock.too_late() == f"not measured within {measured} s"


def test_without_a_limit_nothing_is_too_late(now: list[float]) -> None:
    clock = TrialClock(None)
    clock.loaded(GIB)
    now[0] += 1e6
    assert (clock.too_late(), clock.setting_up, clock.stepped()) == (None, False, 0.0)


def test_a_trial_says_how_large_its_model_is(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"), _emit=told.append)
    a_job = Job("j", "loop_jobs:line", "loop_jobs:points", "loop_jobs:loss", hparams=HParams(lr=0.1))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for measure in (Measure(0, 1), None):
            request = TrainRequest(job=a_job, technique="single", measure=measure)
            model = loop.make_training(request, ranks).parallel.model
    finally:
        dist.destroy_process_group()
    loads = [event["what"] for event in told if event["event"] == "loads"]
    assert loads == ["load_model 'loop_jobs:line'", "load_dataloader 'loop_jobs:points'", ""]
    told = [event for event in told if event["event"] != "loads"]
    assert told == [{"event": "model_loaded", "bytes": sum(p.nbytes for p in model.parameters())}]
