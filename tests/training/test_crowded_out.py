"""A job that ends since others fill the memory is tried again; one that fills it by itself is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import small_job, spec_for

from saturn_airflow.launch import failures, host_memory, runs
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.host_memory import Watch
from saturn_airflow.launch.supervisor import Supervisor


def test_who_had_no_more_than_its_part_is_modest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: 1e9)
    monkeypatch.setattr(host_memory, "available", lambda: 1e6)
    for used, share, modest in ((1e8, 0.5, True), (6e8, 0.5, False), (6e8, 1.0, True)):
        monkeypatch.setattr(host_memory, "_resident", lambda _, used=used: used)
        watch = Watch(lambda: [1], "0.9", share)
        assert watch.modest == "", "nobody has looked"
        watch.look()
        assert bool(watch.modest) is modest
        assert bool(Watch(lambda: [1], "0", share).look() or "") is False


@pytest.mark.parametrize("modest", ["others may have filled it", ""])
def test_a_kill_for_want_of_memory_that_others_used_is_said_so(
    modest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(tmp_path, small_job())
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    (tmp_path / "alive").touch()
    monkeypatch.setattr(Watch, "modest", modest)
    supervisor = Supervisor(tmp_path, None)

    def killed(*_: object) -> Any:
        raise RanksFailedError(failures.of_a_death(0, -9, True))

    monkeypatch.setattr(supervisor, "_call_technique", killed)
    told: dict[str, Any] = {"note": lambda _: None, "goes_on_after": lambda *_: False}
    turn: Any = SimpleNamespace(spec=spec, trains=True, **told)
    monkeypatch.setattr(supervisor, "_with_devices", lambda _: supervisor._with_restarts(turn, [0], []))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("saturn_airflow.launch.descendants.adopt", lambda: None)
    supervisor.run()
    *_, end = list(runs.Run(tmp_path).events())
    assert end["status"] == "out_of_memory"
    assert bool(end.get("occupied")) is bool(modest)
