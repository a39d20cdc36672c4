"""What dies around training, and in it, loses nothing. Each test prints its figure."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import httpx
import pytest
from fault_watch import Watched, gone, patiently

pytestmark = [pytest.mark.services, pytest.mark.ranks, pytest.mark.timeout(2400)]

MLFLOW_AWAY = 120.0
OUTAGES, MISHAPS = 4000, 2000  # batches
MOVED = ("moves-1", "moves-2")


@pytest.fixture(scope="module")
def shared(cluster: Any) -> Any:
    """Two sweeps at once on the same nodes, and two that name a node without a worker."""
    sweeps = [Watched(cluster, name) for name in ("nightly", "weekly", "deaf_node", "deaf_node_fails")]
    for sweep in sweeps:
        cluster.wait_until(sweep.ended, 480, sweep.states)
    return sweeps


def test_two_sweeps_at_once_share_no_device(shared: Any, figure: Callable[[str], None]) -> None:
    spans = []
    for sweep, letter in zip(shared[:2], "nw", strict=True):
        assert sweep.ended() == "success", sweep.why()
        for job in (f"{letter}{i}" for i in range(4)):
            assert sweep.result()[job]["status"] == "finished"
            for _, events in itertools.groupby(sweep.events(job), key=lambda event: event["run"]):
                # The lease ends between the last word of the ranks and that of their supervisor.
                (leased, *_, last, _) = [e for e in events if e["event"] not in ("format", "waiting")]
                spans += [(device, leased["time"], last["time"], job) for device in leased["names"]]
    spans.sort()
    for (device, _, end, job), (other, start, _, next_job) in itertools.pairwise(spans):
        assert device != other or end <= start, f"{job} and {next_job} shared {device}"
    mixed = {device: {job[0] for d, _, _, job in spans if d == device} for device, *_ in spans}
    busy = sum(end - start for _, start, end, _ in spans)
    took = max(end for _, _, end, _ in spans) - min(start for _, start, _, _ in spans)
    figure(f"8 jobs of two sweeps on {len(mixed)} devices, none shared: {busy:.0f} s of them in {took:.0f} s")
    assert any(len(sweeps) == 2 for sweeps in mixed.values()), "the sweeps never met on a device"


def test_where_no_node_is_lost_the_report_waits_for_no_round_in_reserve(
    cluster: Any, shared: Any, figure: Callable[[str], None]
) -> None:
    for sweep in shared[:2]:
        tasks = cluster.airflow.tasks(sweep.dag_id, sweep.run_id)
        reserve = [t for t in tasks if "round_2" in t["task_id"] or t["task_id"] == "sweep.watch"]
        assert len(reserve) == 6
        assert {task["state"] for task in reserve} == {"skipped"}
        begun = [task["task_id"] for task in reserve if task["task_id"] != "sweep.watch" and task["pid"]]
        assert begun == [], "a process was started for them"
        trained = max(t["end_date"] for t in tasks if t["task_id"].startswith("sweep.train."))
        (report,) = [task for task in tasks if task["task_id"] == "sweep.report"]
        seconds = [datetime.fromisoformat(moment).timestamp() for moment in (trained, report["queued_when"])]
        figure(f"{sweep.dag_id}: its report was queued {seconds[1] - seconds[0]:.1f} s after training")


def test_a_node_without_a_worker_is_left_out(cluster: Any, shared: Any) -> None:
    sweep = shared[2]
    assert sweep.ended() == "success", sweep.why()
    there = sweep.result()["there"]
    assert there["status"] == "not_planned"
    assert "its node gpu-z takes no part: no worker listens on its queue" in there["reason"]
    anywhere = sweep.result()["anywhere"]
    assert (anywhere["status"], anywhere["node"]) == ("finished", "gpu-a")
    plan = cluster.airflow.xcom(sweep.dag_id, sweep.run_id, "sweep.plan", "plan")
    assert list(plan["left_out"]) == ["gpu-z"]


def test_a_node_without_a_worker_is_an_error_of_the_first_try_where_that_is_wanted(
    cluster: Any, shared: Any, figure: Callable[[str], None]
) -> None:
    sweep = shared[3]
    assert sweep.ended() == "failed"
    tasks = cluster.airflow.tasks(sweep.dag_id, sweep.run_id)
    (trials,) = [task for task in tasks if task["task_id"] == "sweep.trials"]
    assert trials["try_number"] == 1
    figure(f"a node without a worker: an error after {trials['duration']:.0f} s")
    lines = "\n".join(cluster.airflow.log(sweep.dag_id, sweep.run_id, "sweep.trials", -1, 1))
    assert "No worker listens on saturn.gpu-z yet" in lines


def test_a_job_leaves_a_drained_node_with_a_checkpoint_and_goes_on_elsewhere(
    cluster: Any, figure: Callable[[str], None]
) -> None:
    sweep = Watched(cluster, "drained")
    cluster.wait_until(lambda: sweep.events("leaves", "checkpoint"), 480, sweep.states)
    began_on = sweep.node("leaves")
    _saturn(cluster, "drain", began_on, "--reason", "new disks")
    asked = time.time()
    try:
        cluster.wait_until(lambda: len(sweep.events("leaves", "start")) > 1, 480, sweep.states)
        sweep.hurry("leaves")
        cluster.wait_until(sweep.ended, 480, sweep.states)
    finally:
        _saturn(cluster, "undrain", began_on)
    assert sweep.ended() == "success", sweep.why()
    _, second = sweep.events("leaves", "start")
    figure(f"a drained node: its job trained elsewhere {second['time'] - asked:.0f} s later")
    assert sweep.steps("leaves") == list(range(1, MISHAPS + 1)), "no step was lost"
    outcome = sweep.result()["leaves"]
    assert (outcome["status"], {outcome["node"], began_on}) == ("finished", {"gpu-a", "gpu-b"})
    plan = cluster.airflow.xcom(sweep.dag_id, sweep.run_id, "sweep.round_2.plan", "plan")
    assert plan["left_out"] == {began_on: "it is drained (new disks)"}


def _saturn(cluster: Any, *arguments: str) -> None:
    """A command on the head."""
    subprocess.run(["saturn", *arguments], env=cluster.environment("scheduler"), check=True)


@pytest.fixture(scope="module")
def outages(cluster: Any) -> Any:
    """One job on each node trains while all that is around it goes away and comes back; what was seen."""
    sweep = Watched(cluster, "outages")
    jobs = ("on-a", "on-b")
    cluster.wait_until(lambda: all(len(sweep.steps(job)) > 5 for job in jobs), 480, sweep.states)
    seen: dict[str, Any] = {"sweep": sweep, "trainings": {job: sweep.processes(job) for job in jobs}}
    seen["devices"] = subprocess.run(
        ["saturn", "devices", "--json"], env=cluster.environment("gpu-a"), capture_output=True, text=True
    ).stdout

    _clear_plan_alone(sweep)
    begin = time.monotonic()
    cluster.kill("mlflow")
    cluster.kill("gpu-a")
    killed = time.monotonic()
    seen["steps at the kill"] = len(sweep.steps("on-a"))
    cluster.start_again("gpu-a", wait=False)
    patiently(cluster, _whatever(lambda: _is_followed_again(sweep, "on-a")), 240, _whatever(sweep.states))
    seen["reconnected"] = time.monotonic() - killed
    seen["steps at the reconnect"] = len(sweep.steps("on-a"))

    for name, sign in {
        "redis": signal.SIGKILL,
        "scheduler": signal.SIGKILL,
        "postgres": signal.SIGQUIT,
    }.items():
        cluster.kill(name, sign)
        cluster.start_again(name, wait=False)
    cluster.kill("airflow")
    patiently(cluster, lambda: not any(map(sweep.is_followed, jobs)), 300)
    cluster.start_again("airflow", wait=False)
    patiently(cluster, lambda: time.monotonic() > begin + MLFLOW_AWAY, MLFLOW_AWAY)
    cluster.start_again("mlflow", wait=False)
    sweep.hurry(*jobs)
    patiently(cluster, _whatever(sweep.ended), 480, sweep.states)
    return seen


def _clear_plan_alone(sweep: Watched) -> None:
    """Without the tasks that train by it; it is handed on again."""

    def plan() -> Any:
        tasks = sweep.cluster.airflow.tasks(sweep.dag_id, sweep.run_id)
        return next(task for task in tasks if task["task_id"] == "sweep.plan")

    sweep.cluster.airflow.clear(sweep.dag_id, sweep.run_id, plan())
    sweep.cluster.wait_until(lambda: plan()["state"] == "success", 480, sweep.states)


def _is_followed_again(sweep: Watched, job: str) -> bool:
    task = sweep.task(job)
    return task["try_number"] > 1 and task["state"] == "running" and sweep.is_followed(job)


def test_a_killed_worker_costs_no_step_and_its_task_reconnects(
    outages: Any, figure: Callable[[str], None]
) -> None:
    sweep = outages["sweep"]
    figure(f"worker killed: the task followed its training again after {outages['reconnected']:.0f} s")
    assert len({event["run"] for event in sweep.events("on-a")}) == 1, "training was started anew"
    assert outages["steps at the reconnect"] > outages["steps at the kill"]
    assert sweep.steps("on-a") == list(range(1, OUTAGES + 1))


def test_training_goes_on_without_api_server_scheduler_redis_and_postgres(
    outages: Any, figure: Callable[[str], None]
) -> None:
    sweep = outages["sweep"]
    assert sweep.ended() == "success", sweep.why()
    for job in ("on-a", "on-b"):
        times = [event["time"] for event in sweep.events(job, "step")]
        pause = max(b - a for a, b in itertools.pairwise(times))
        tries = sweep.task(job)["try_number"]
        figure(f"{job}: the longest pause between two steps was {pause:.1f} s; it took {tries} tries")
        assert sweep.steps(job) == list(range(1, OUTAGES + 1))
        assert len({event["run"] for event in sweep.events(job)}) == 1
        assert sweep.result()[job]["status"] == "finished"
        assert tries > 1, "nobody followed it for a while"


def test_no_metric_is_lost_or_doubled_by_two_minutes_without_mlflow(
    outages: Any, figure: Callable[[str], None]
) -> None:
    sweep = outages["sweep"]
    for job in ("on-a", "on-b"):
        steps = sweep.metric_steps(sweep.result()[job]["run_id"])
        figure(f"{job}: MLflow has {len(steps)} of {OUTAGES} losses after {MLFLOW_AWAY:.0f} s without it")
        assert sorted(steps) == list(range(1, OUTAGES + 1))


def test_devices_says_who_holds_what(outages: Any) -> None:
    shown = json.loads(outages["devices"])
    holders = {d["name"]: d["holder"]["who"] for d in shown["devices"] if d["holder"]}
    assert sorted(name.rpartition(": ")[2] for name in holders.values()) == ["on-a", "on-b"]
    assert {name.partition("-cpu")[0] for name in holders} == {"gpu-a", "gpu-b"}


@pytest.fixture(scope="module")
def mishaps(cluster: Any) -> Any:
    """One node is gone for good; meanwhile every job on the other one meets with something."""
    lost = Watched(cluster, "lost_node")
    cluster.wait_until(lambda: len(lost.events("stranded", "checkpoint")) > 1, 480, lost.states)
    again = Watched(cluster, "lost_and_moved")
    cluster.wait_until(lambda: _under_way(again, MOVED), 480, again.states)
    cluster.kill("gpu-b", everything=True)
    killed = time.monotonic()
    sweep = Watched(cluster, "mishaps")
    seen: dict[str, Any] = {"lost": lost, "again": again, "sweep": sweep}
    sweep.hurry("undisturbed")
    todo = {"rank-killed": _kill_a_rank, "cleared": _clear, "failed": _mark_failed}
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            todo["full-disk"] = _fill_disk
            small_disk(stack, sweep.folder("full-disk"))
        while not sweep.ended():
            for job in [job for job in todo if len(sweep.events(job, "checkpoint")) > 1]:
                seen[job] = todo.pop(job)(sweep, job)
                sweep.hurry(job)
            assert time.monotonic() < sweep.triggered + 600, sweep.states()
            time.sleep(0.1)
    cluster.wait_until(lost.ended, 480, lost.states)
    seen["reported"] = time.monotonic() - killed
    cluster.wait_until(again.ended, 480, again.states)
    cluster.start_again("gpu-b", wait=False)
    return seen


def _under_way(sweep: Watched, jobs: tuple[str, ...]) -> list[str]:
    return [job for job in jobs if len(sweep.events(job, "checkpoint")) > 1]


def small_disk(stack: contextlib.ExitStack, folder: Any) -> None:
    """A disk of eight MiB in place of ``folder``."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)

    def keep() -> None:
        shutil.copytree(folder, f"{folder}.kept")
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.copytree(f"{folder}.kept", folder, dirs_exist_ok=True)

    stack.callback(keep)


def _kill_a_rank(sweep: Watched, job: str) -> dict[str, Any]:
    rank = max(sweep.processes(job), key=lambda process: process.create_time())
    rank.kill()
    return {"step": sweep.steps(job)[-1]}


def _clear(sweep: Watched, job: str) -> dict[str, Any]:
    task = sweep.task(job)
    return _until_gone(sweep, job, lambda: sweep.cluster.airflow.clear(sweep.dag_id, sweep.run_id, task))


def _mark_failed(sweep: Watched, job: str) -> dict[str, Any]:
    task = sweep.task(job)
    path = f"/dags/{sweep.dag_id}/dagRuns/{sweep.run_id}/taskInstances/{task['task_id']}/{task['map_index']}"
    return _until_gone(sweep, job, lambda: sweep.cluster.airflow.send("PATCH", path, {"new_state": "failed"}))


def _until_gone(sweep: Watched, job: str, click: Callable[[], object]) -> dict[str, Any]:
    processes = sweep.processes(job)
    click()
    clicked = time.monotonic()
    sweep.cluster.wait_until(lambda: gone(processes), 600)
    # A cleared job's next try may already hold the device again.
    free = not sweep.holders(job) & {process.pid for process in processes}
    return {"seconds": time.monotonic() - clicked, "free": free}


def _fill_disk(sweep: Watched, job: str) -> dict[str, Any]:
    filler = sweep.folder(job) / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    # Nothing can be written that would tell; but each attempt leaves a folder, which the next one removes.
    folder = sweep.folder(job) / "checkpoints"
    for _ in range(2):
        before = folder.stat().st_mtime_ns
        sweep.cluster.wait_until(lambda since=before: folder.stat().st_mtime_ns > since)
    filler.unlink()
    return {}


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    mishaps: Any, figure: Callable[[str], None]
) -> None:
    sweep = mishaps["sweep"]
    starts = sweep.events("rank-killed", "start")
    assert len(starts) == 2
    assert {start["run"] for start in starts} == {1}, "its supervisor starts it again, without another try"
    before = starts[1]["time"]
    saved = [e["step"] for e in sweep.events("rank-killed", "checkpoint") if e["time"] < before]
    assert [start["step"] for start in starts] == [0, saved[-1]]
    figure(f"rank killed at step {mishaps['rank-killed']['step']}: went on from step {saved[-1]}")
    assert sorted(sweep.losses("rank-killed")) == list(range(1, MISHAPS + 1))
    assert _first(100, sweep.losses("rank-killed")) == sweep.losses("undisturbed")
    assert sweep.result()["rank-killed"]["status"] == "finished"


@pytest.mark.parametrize("job", ["cleared", "failed"])
def test_a_task_that_is_cleared_or_marked_failed_frees_its_devices(
    mishaps: Any, job: str, figure: Callable[[str], None]
) -> None:
    seen = mishaps[job]
    figure(f"task {job}: its ranks were gone after {seen['seconds']:.1f} s")
    assert seen["free"]
    sweep = mishaps["sweep"]
    ends = sweep.events(job, "end")
    assert ends[0]["status"] == "stopped", "it would have gone on for minutes"
    assert ends[0]["result"]["checkpoint"], "it had time to save what it had"
    if job == "cleared":
        assert sweep.steps(job) == list(range(1, MISHAPS + 1)), (
            "the next try went on where the first had stopped"
        )
        assert sweep.result()[job]["status"] == "finished"
    else:
        assert len(ends) == 1
        assert sweep.result()[job]["status"] == "stopped"
        assert sweep.task(job)["state"] == "failed"


def test_a_full_disk_is_outlived(mishaps: Any, figure: Callable[[str], None]) -> None:
    if "full-disk" not in mishaps:
        pytest.skip("mounting a small disk needs root")
    sweep = mishaps["sweep"]
    warnings = [e["message"] for e in sweep.events("full-disk", "warning")]
    assert any("No space left" in message for message in warnings), warnings
    figure(f"full disk: {len(warnings)} warnings such as {warnings[0]!r}")
    assert sweep.steps("full-disk") == list(range(1, MISHAPS + 1))
    assert _first(100, sweep.losses("full-disk")) == sweep.losses("undisturbed")
    assert sweep.result()["full-disk"]["status"] == "finished"
    assert sorted(sweep.metric_steps(sweep.result()["full-disk"]["run_id"])) == list(range(1, MISHAPS + 1))


def test_a_node_that_is_gone_is_reported_with_its_last_checkpoint(
    mishaps: Any, figure: Callable[[str], None]
) -> None:
    lost = mishaps["lost"]
    stranded = lost.result()["stranded"]
    figure(f"node gone: the sweep ended {mishaps['reported']:.0f} s later; {stranded['reason']}")
    assert lost.ended() == "success", lost.why()
    assert lost.result()["elsewhere"]["status"] == "finished"
    assert stranded["status"] != "finished"
    last = lost.events("stranded", "checkpoint")[-1]
    assert (stranded["checkpoint"], stranded["steps"]) == (last["path"], last["step"])


def test_the_jobs_of_a_node_that_is_gone_go_on_elsewhere(mishaps: Any, figure: Callable[[str], None]) -> None:
    again = mishaps["again"]
    assert again.ended() == "success", again.why()
    undisturbed = mishaps["sweep"].losses("undisturbed")
    begun = {job: again.events(job, "start") for job in MOVED}
    for job, starts in begun.items():
        outcome = again.result()[job]
        assert (outcome["status"], outcome["node"]) == ("finished", "gpu-a")
        losses = again.losses(job)
        assert sorted(losses) == list(range(1, 201))
        assert _first(100, losses) == undisturbed
        assert sorted(again.metric_steps(outcome["run_id"])) == list(range(1, 201))
        saved = [e for e in again.events(job, "checkpoint") if e["time"] < starts[-1]["time"]]
        # The last one may have been whole before anybody could tell.
        assert starts[-1]["step"] >= (saved[-1]["step"] if saved else 0)
        if len(starts) > 1:
            pause = starts[-1]["time"] - saved[-1]["time"]
            figure(f"node gone: {job} went on elsewhere from step {saved[-1]['step']} after {pause:.0f} s")
    assert any(len(starts) == 2 for starts in begun.values()), begun


def _first(count: int, losses: dict[int, float]) -> dict[int, float]:
    return {step: loss for step, loss in losses.items() if step <= count}


def _whatever(ask: Callable[[], Any]) -> Callable[[], Any]:
    """``ask``, which has no answer while the services it asks are away."""

    def asked() -> Any:
        with contextlib.suppress(httpx.HTTPError):
            return ask()
        return None

    return asked
