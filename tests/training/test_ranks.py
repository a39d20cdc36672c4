"""Ranks: launched warm, stopped together, watched, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from saturn_airflow.launch import host_memory, launching
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import DoesNotFit, NotANumberError
from saturn_airflow.model.errors import JobError
from saturn_airflow.training import ranks
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks
#: Whether NCCL's watchdog ends a process whose GPU met an error, before the process can say which.
ABORTS = "TORCH_NCCL_RETHROW_CUDA_ERRORS"


def add_up(offset: int, ranks: Ranks) -> dict[str, Any]:
    total = torch.tensor([float(ranks.rank + offset)])
    dist.all_reduce(total)
    ranks.emit("added", total=total.item(), rank=ranks.rank)
    return {
        "total": total.item(),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "aborts": os.environ.get(ABORTS),
    }


def step_until_stopped(folder: str, ranks: Ranks) -> int:
    step = 0
    while not ranks.any(ranks.stop_requested()):
        step += 1
        time.sleep(0.005 * (1 + ranks.rank))
        ranks.emit("step", step=step, loss=0.0)
    Path(folder, f"stopped-{ranks.rank}").write_text(str(step))
    return step


def step_fast(folder: str, ranks: Ranks) -> None:
    for step in range(1, 301):
        ranks.emit("step", step=step, loss=0.0)
    ranks.emit("between")
    ranks.emit("step", step=301, loss=0.0)
    ranks.emit("step", step=302, loss=0.0)
    while not Path(folder, "heard").exists():
        time.sleep(0.02)


def sleep_for_ever(ranks: Ranks) -> None:
    ranks.barrier()
    ranks.emit("asleep")
    time.sleep(1000)


def fail_on_rank_1(how: str, folder: str, ranks: Ranks) -> None:
    Path(folder, f"pid-{os.getpid()}").touch()
    ranks.barrier()
    if ranks.rank == 1:
        if how == "raise":
            raise ValueError("rank 1 does not like this")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(1000)
        if how == "late":
            dist.destroy_process_group()
            time.sleep(0.3)
            raise ValueError("rank 1 was on its way out")
    dist.all_reduce(torch.ones(1))
    ranks.barrier()


def raise_this(what: str, ranks: Ranks) -> None:
    if what == "job":
        try:
            {}["labels"]  # type: ignore[index]
        except KeyError as error:
            raise JobError("the loss function raised KeyError: 'labels'") from error
    if what == "nan":
        raise NotANumberError("the loss is nan at step 3")
    if what == "fit":
        raise DoesNotFit("7 heads can't be divided by 2")
    if what == "cpu memory":
        torch.empty(1 << 60, dtype=torch.uint8)
    if what == "cuda memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def spend_memory(ranks: Ranks) -> None:
    block = bytearray(200 << 20)
    del block


def name_here(ranks: Ranks) -> str:
    return multiprocessing.current_process().name


def test_a_rank_is_no_worker_of_data_to_libraries() -> None:
    """As transformers asks, which seeds the masks of its collators by it."""
    assert ranks.launch(name_here, size=1) == ["MainProcess"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_a_process_group_and_return_what_they_found(size: int) -> None:
    events: list[dict[str, Any]] = []
    results = ranks.launch(add_up, 10, size=size, threads=1, on_event=events.append)
    expected = sum(range(10, 10 + size))
    assert [result["total"] for result in results] == [expected] * size
    assert {result["threads"] for result in results} == {1}
    assert {result["aborts"] for result in results} == {"0"}
    assert len({result["pid"] for result in results}) == size
    assert events == [{"event": "added", "total": expected, "rank": 0}], "only rank 0 is heard"


def test_a_rank_has_no_more_threads_than_cores() -> None:
    (result,) = ranks.launch(add_up, 10, size=1, threads=1024)
    assert result["threads"] == len(os.sched_getaffinity(0))


def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    results = ranks.launch(
        step_until_stopped, str(tmp_path), size=4, on_event=seen.append, poll=lambda: len(seen) > 5
    )
    assert results == [results[0]] * 4
    assert results[0] > 5


def test_of_steps_that_are_told_together_none_is_lost_and_none_held_back(tmp_path: Path) -> None:
    heard: list[Any] = []

    def hear(event: dict[str, Any]) -> None:
        heard.append(event.get("step", event["event"]))
        if event.get("step") == 302:
            (tmp_path / "heard").touch()

    ranks.launch(step_fast, str(tmp_path), size=1, on_event=hear, hang_seconds=30)
    assert heard == [*range(1, 301), "between", 301, 302]


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("raise", "failed", "ValueError: rank 1 does not like this"),
        ("late", "failed", "ValueError: rank 1 was on its way out"),
        ("kill", "lost", "rank 1 was killed by SIGKILL"),
        ("exit", "lost", "rank 1 exited with code 3"),
        ("hang", "hung", "rank 1 has not moved for 2 s"),
    ],
)
def test_the_first_failing_rank_is_named(how: str, status: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks.launch(fail_on_rank_1, how, str(tmp_path), size=3, hang_seconds=2 if how == "hang" else 60)
    failure = caught.value.failure
    assert (failure.status, failure.rank) == (status, 1)
    assert failure.reason.startswith(words)
    if how in ("raise", "late", "hang"):
        assert "fail_on_rank_1" in failure.traceback
    assert "saturn_airflow/training/ranks.py" not in failure.traceback.split("fail_on_rank_1")[0]
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("what", "status", "whose", "words"),
    [
        ("job", "failed", "job", "the loss function raised KeyError: 'labels'"),
        ("nan", "not_a_number", "job", "the loss is nan at step 3"),
        ("fit", "does_not_fit", "technique", "7 heads can't be divided by 2"),
        ("cpu memory", "out_of_memory", "", "RuntimeError"),
        ("cuda memory", "out_of_memory", "", "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_failures_are_told_apart(what: str, status: str, whose: str, words: str) -> None:
    with pytest.raises(RanksFailedError) as caught:
        ranks.launch(raise_this, what, size=1)
    failure = caught.value.failure
    assert (failure.status, failure.whose) == (status, whose)
    assert words in failure.reason
    if what == "job":
        assert '{}["labels"]' in failure.traceback
        assert failure.traceback.endswith("KeyError: 'labels'")


def test_a_rank_killed_by_the_kernel_for_want_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kills = iter([3, 4])
    monkeypatch.setattr(host_memory, "kernel_kills", lambda: next(kills))
    with pytest.raises(RanksFailedError) as caught:
        ranks.launch(fail_on_rank_1, "kill", str(tmp_path), size=2)
    assert caught.value.failure.status == "out_of_memory"
    assert caught.value.failure.reason == (
        "rank 1 was killed by the kernel because the memory of its machine, or of its container, ran out"
    )


def test_peak_memory_is_measured() -> None:
    (result,) = launching.launch_ranks(launching.pack(spend_memory), 1)
    (idle,) = launching.launch_ranks(launching.pack(raise_this, ""), 1)
    assert result["peak_host_bytes"] - idle["peak_host_bytes"] > 150 << 20


def test_no_rank_survives_its_launcher(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from saturn_airflow.training import ranks
        if __name__ == "__main__":
            ranks.launch("test_ranks:sleep_for_ever", size=2,
                         on_event=lambda event: print("asleep", flush=True))
        """)
    )
    launcher = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent.parent
    )
    assert launcher.stdout is not None
    launcher.stdout.readline()
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) >= 3, "two ranks and their server"
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
