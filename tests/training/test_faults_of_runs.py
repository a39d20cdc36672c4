"""Whatever happens to a training from outside: it ends with the losses and weights of an undisturbed one."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import small_job, spec_for

from saturn_airflow.launch import runs
from saturn_airflow.launch.runs import Run, RunSpec

pytestmark = pytest.mark.ranks

BATCHES = 30
TECHNIQUES = {"single": 1, "ddp": 2}
Fault = Callable[[Run], object]


def _spec(folder: Path, technique: str) -> RunSpec:
    job = replace(
        small_job("slow", batches=BATCHES, optimizer="torch.optim:Adam"), load_model="slow_disk:model"
    )
    settings: dict[str, Any] = {"checkpoint_batches": 5, "keep_checkpoints": 2, "stop_seconds": 10.0}
    return spec_for(
        folder, replace(job, load_model="slow_disk:model"), technique, TECHNIQUES[technique], **settings
    )


@pytest.fixture(scope="module")
def ends_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunSpec]:
    """A run under a technique that nothing happens to: once each, in whatever order tests ask."""

    @functools.cache
    def one(technique: str) -> RunSpec:
        spec = _spec(tmp_path_factory.mktemp("undisturbed"), technique)
        end = runs.start(spec).wait()
        assert end["status"] == "finished", end
        return spec

    return one


@pytest.fixture(params=TECHNIQUES)
def undisturbed(request: pytest.FixtureRequest, ends_undisturbed: Callable[[str], RunSpec]) -> RunSpec:
    return ends_undisturbed(request.param)


def _supervisor(run: Run) -> psutil.Process:
    return psutil.Process(int((run.folder / "alive").read_text()))


def _rank(run: Run) -> psutil.Process:
    """The last that was launched."""
    children = _supervisor(run).children(recursive=True)
    return max(children, key=lambda p: p.create_time())


def _checkpoints(run: Run) -> Path:
    return run.folder.parents[1] / "checkpoints"


def _while_it_saves(run: Run) -> None:
    deadline = time.monotonic() + 60
    while not list(_checkpoints(run).glob(".saving-*/*")):
        assert time.monotonic() < deadline
        assert run.is_alive()
        time.sleep(0.002)


def _kill_the_supervisor_while_it_saves(run: Run) -> None:
    _while_it_saves(run)
    _supervisor(run).kill()


def _kill_a_rank_while_it_saves(run: Run) -> None:
    _while_it_saves(run)
    _rank(run).kill()


def _hold_up(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)


def _hold_up_a_rank(run: Run) -> None:
    _hold_up(_rank(run))


def _hold_up_the_supervisor(run: Run) -> None:
    _hold_up(_supervisor(run))


def _hold_up_the_supervisor_and_kill_it(run: Run) -> None:
    supervisor = _supervisor(run)
    supervisor.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    supervisor.kill()


def _stop_one_that_is_held_up(run: Run) -> None:
    supervisor = _supervisor(run)
    supervisor.send_signal(signal.SIGSTOP)
    run.stop(timeout=1.0)


def _remove_the_checkpoints(run: Run) -> None:
    shutil.rmtree(_checkpoints(run), ignore_errors=True)


def _remove_the_checkpoints_and_kill(run: Run) -> None:
    _remove_the_checkpoints(run)
    for _ in range(500):
        if list(_checkpoints(run).glob("step-*")):
            break
        time.sleep(0.02)
    else:
        raise AssertionError("no checkpoint was written any more")
    _supervisor(run).kill()


def _newest_file(run: Run) -> Path:
    newest = max(_checkpoints(run).glob("step-*"))
    return max(newest.glob("*.safetensors"))


def _truncate_the_newest_and_kill(run: Run) -> None:
    supervisor = _supervisor(run)
    os.killpg(supervisor.pid, signal.SIGKILL)
    os.truncate(_newest_file(run), 100)


def _truncate_the_newest_and_kill_a_rank(run: Run) -> None:
    _supervisor(run).send_signal(signal.SIGSTOP)
    _rank(run).kill()
    os.truncate(_newest_file(run), 100)
    _supervisor(run).send_signal(signal.SIGCONT)


def _kill_a_rank_and_the_supervisor(run: Run) -> None:
    rank, supervisor = _rank(run), _supervisor(run)
    rank.kill()
    supervisor.kill()


def _kill_a_rank_as_it_is_told_to_stop(run: Run) -> None:
    rank = _rank(run)
    run.ask_to_stop()
    rank.kill()


def _kill_a_rank_as_it_starts_again(run: Run) -> None:
    _rank(run).kill()
    deadline = time.monotonic() + 30
    while not any(event["event"] == "restarting" for event in run.so_far()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(0.1)
    for process in _supervisor(run).children():
        process.kill()


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for run in runs.all_of(folder):
        yield from run.so_far()


def _losses(spec: RunSpec) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for event in _events(Path(spec.folder)):
        if event["event"] == "step":
            found.setdefault(event["step"], set()).add(event["loss"])
    return found


def _weights(spec: RunSpec) -> bytes:
    return (Path(spec.folder) / "model" / "model.safetensors").read_bytes()


# Where another rank is left, or a save is everybody's.
OF_RANKS: list[Fault] = [
    _kill_the_supervisor_while_it_saves,
    _kill_a_rank_while_it_saves,
    _hold_up_a_rank,
    _truncate_the_newest_and_kill_a_rank,
    _kill_a_rank_and_the_supervisor,
    _kill_a_rank_as_it_is_told_to_stop,
    _kill_a_rank_as_it_starts_again,
]
# Of these a second rank makes nothing else.
OF_RUNS: list[Fault] = [
    _hold_up_the_supervisor,
    _hold_up_the_supervisor_and_kill_it,
    _stop_one_that_is_held_up,
    _remove_the_checkpoints,
    _remove_the_checkpoints_and_kill,
    _truncate_the_newest_and_kill,
]
CASES = [
    *[(technique, fault) for technique in TECHNIQUES for fault in OF_RANKS],
    *[("single", fault) for fault in OF_RUNS],
]
alone = pytest.mark.parametrize("undisturbed", ["single"], indirect=True)


Ended = Future[tuple[RunSpec, dict[str, Any]]]


def _disturbed(folder: Path, technique: str, fault: Fault) -> tuple[RunSpec, dict[str, Any]]:
    """A run that meets with a fault after its second checkpoint, and the end of the last of its tries."""
    spec = _spec(folder, technique)
    run = runs.start(spec)
    saved = 0
    for event in run.events(poll=0.005):
        assert event["event"] != "end", event
        saved += event["event"] == "checkpoint"
        if saved == 2:
            break
    fault(run)
    end = run.wait()
    tries = 1
    while end["status"] in ("lost", "stopped") and tries < 3:
        tries += 1
        end = runs.start(spec).wait()
    return spec, end


@pytest.fixture(scope="module")
def disturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, Fault], Ended]]:
    """What becomes of the chosen cases: three at a time, since most of the time they wait for a disk."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = [
        (one["undisturbed"], one["fault"])
        for one in chosen
        if (one.get("undisturbed"), one.get("fault")) in CASES
    ]
    with ThreadPoolExecutor(3) as pool:
        yield {case: pool.submit(_disturbed, tmp_path_factory.mktemp("disturbed"), *case) for case in wanted}


@pytest.mark.parametrize(
    ("undisturbed", "fault"),
    CASES,
    indirect=["undisturbed"],
    ids=[f"{technique}-{fault.__name__.strip('_')}" for technique, fault in CASES],
)
def test_it_ends_as_if_nothing_had_happened(
    fault: Fault, undisturbed: RunSpec, disturbed: dict[tuple[str, Fault], Ended]
) -> None:
    spec, end = disturbed[undisturbed.technique, fault].result()
    assert end["status"] == "finished", end
    assert _losses(spec) == _losses(undisturbed)
    assert _weights(spec) == _weights(undisturbed)
    # Whatever was there when it happened was not trained again from the beginning.
    starts = [event["step"] for event in _events(Path(spec.folder)) if event["event"] == "start"]
    assert all(step >= 5 for step in starts[1:]), starts
    assert not list(Path(spec.folder).glob("checkpoints/.*"))
    assert max(Path(spec.folder).glob("checkpoints/step-*")).name == f"step-{BATCHES:08}"


@alone
@pytest.mark.parametrize("taken", [Path, Path.parent.fget], ids=["its folder", "all runs"])  # type: ignore[attr-defined]
def test_who_takes_the_folder_of_a_run_away_ends_it(
    taken: Callable[[Path], Path], undisturbed: RunSpec, tmp_path: Path
) -> None:
    spec = _spec(tmp_path, undisturbed.technique)
    run = runs.start(spec)
    for event in run.events(poll=0.005):
        if event["event"] == "checkpoint":
            break
    processes = [_supervisor(run), *_supervisor(run).children(recursive=True)]
    shutil.rmtree(taken(run.folder))
    assert psutil.wait_procs(processes, timeout=60)[1] == [], "it would train beside the next run"
    end = run.end
    assert end is not None
    assert end["status"] == "lost"
    assert "taken" in end["reason"]
    assert runs.start(spec).wait()["status"] == "finished"
    assert _weights(spec) == _weights(undisturbed)


def test_a_rank_that_is_held_up_for_too_long_is_started_again(undisturbed: RunSpec, tmp_path: Path) -> None:
    spec = replace(_spec(tmp_path, undisturbed.technique), hang_seconds=8.0)
    run = runs.start(spec)
    for event in run.events(poll=0.005):
        if event["event"] == "checkpoint":
            break
    rank = _rank(run)
    rank.send_signal(signal.SIGSTOP)
    end = run.wait()
    assert end["status"] == "finished", end
    (warning,) = [e["message"] for e in run.so_far() if e["event"] == "warning"]
    assert f"kill -CONT {rank.pid}" in warning
    (again,) = [e["reason"] for e in run.so_far() if e["event"] == "restarting"]
    assert "held up by a signal for 8 s" in again
    assert _losses(spec) == _losses(undisturbed)
    assert _weights(spec) == _weights(undisturbed)


@alone
def test_a_supervisor_that_is_held_up_for_too_long_is_ended_by_who_follows(
    undisturbed: RunSpec, tmp_path: Path
) -> None:
    spec = replace(_spec(tmp_path, undisturbed.technique), hang_seconds=8.0)
    run = runs.start(spec)
    said: list[dict[str, Any]] = []
    for event in run.events(poll=0.005):
        said.append(event)
        if event["event"] == "checkpoint" and len(said) < 1000:
            supervisor = _supervisor(run)
            supervisor.send_signal(signal.SIGSTOP)
    assert said[-1]["status"] == "lost"
    (warning,) = [e["message"] for e in said if e["event"] == "warning"]
    assert f"kill -CONT {supervisor.pid}" in warning
    assert runs.start(spec).wait()["status"] == "finished"
    assert _losses(spec) == _losses(undisturbed)
    assert _weights(spec) == _weights(undisturbed)
