"""Where GPUs end: memory that runs out, others who use it, waits of the host, models larger than the device.

Like test_cuda.py, part of `make test-cuda`; with ``SATURN_CUDA_TESTS_ON=cpu`` most of it runs on CPU ranks.
"""

# Models without types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import Strategy, deviation, job, run
from cells import request as train_request
from torch import nn

from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.model.cluster import Node
from saturn_airflow.model.estimates import Trial
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.parallelism.transfers import Done, OnStreams
from saturn_airflow.profiling.measure import measure
from saturn_airflow.training import precision as precisions
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.ranks import launch as launch_ranks

ON = os.environ.get("SATURN_CUDA_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.ranks,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ON == "cuda" and not torch.cuda.device_count(), reason="there is no GPU"),
]
needs_a_gpu = pytest.mark.skipif(ON != "cuda", reason="this is about a GPU")
WIDTH, DEPTH = 512, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def model_of(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), *(Block(width) for _ in range(DEPTH)))


def made(spill: bool, model: nn.Module, ranks: Ranks) -> Parallel:
    return Spilled(model, ranks, 2, None) if spill else Parallel(model.to(ranks.device), ranks)


def steps(spill: bool, precision: str, ranks: Ranks) -> float:
    """The last of five losses; in the last step whatever makes the host wait for the GPU raises."""
    precisions.use(precision)
    model = model_of()
    parallel = made(spill, model, ranks)
    described = Job("j", "x:y", "x:y", "test_cuda_limits:mean_square", hparams=HParams(precision=precision))
    objective = Objective(described, model, ranks.device)
    optimizer = torch.optim.AdamW(parallel.trainable().values(), lr=1e-3, fused=True)
    on_gpu = ranks.device.type == "cuda"
    x = torch.randn(64, WIDTH, pin_memory=on_gpu)
    for step in range(5):
        with refused_waits(on_gpu and step == 4):
            if spill:
                parallel.step_beside(optimizer)
            objective.begin(64)
            total, _ = parallel.backward(objective, [x, x], 64, 1 / 64, True)
            parallel.finish_gradients()
            if not spill:
                parallel.clip_gradients(1.0)
            optimizer.step()
            parallel.drop_gradients()
    return float(total)


@contextmanager
def refused_waits(refused: bool) -> Iterator[None]:
    """Inside, what makes the host wait for the GPU raises."""
    if not refused:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def whole_training(clip: float | None, folder: str, ranks: Ranks) -> list[float]:
    """The losses of the loop itself, whose batches are fetched ahead, with checkpoints between."""
    from saturn_airflow.training.loop import train

    losses: list[float] = []

    def note(event: dict[str, Any]) -> None:
        losses.extend([event["loss"]] if event["event"] == "step" else [])

    a_job = job(hparams=HParams(batches=12, precision="float64", lr=1e-2, clip_grad_norm=clip))
    asked = train_request(a_job, Strategy("spill"), Path(folder), checkpoint_batches=5)
    train(asked, replace(ranks, _emit=note))
    return losses


@pytest.mark.parametrize("clip", [None, 0.1])
def test_spilled_steps_overlap_and_losses_are_the_same(clip: float | None, tmp_path: Path) -> None:
    (found,) = launch_ranks(whole_training, clip, str(tmp_path / "there"), size=1, device_type=ON)
    (on_cpu,) = launch_ranks(whole_training, clip, str(tmp_path / "here"), size=1)
    assert len(found) == 12
    assert found == pytest.approx(on_cpu, rel=1e-10)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("spill", [False, True], ids=["single", "spill"])
def test_the_host_does_not_wait_within_a_step(spill: bool, precision: str) -> None:
    (loss,) = launch_ranks(steps, spill, precision, size=1, device_type=ON)
    (on_cpu,) = launch_ranks(steps, False, "float32", size=1)
    assert loss == pytest.approx(on_cpu, rel={"float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}[precision])


def sanitized(missing: str, ranks: Ranks) -> float:
    """Spilled steps under CUDA's sanitizer in torch, which raises where a stream did not wait for another.

    It sees what its own thread asks for, so what lanes do is done there.

    :param missing: a wait to leave out; empty for none.
    """
    changed: Any = OnStreams
    changed.begin = lambda self, lane, work: Done(work())
    if missing:
        setattr(changed, missing, lambda self, *given: None)
    if ranks.device.type == "cuda":
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    return steps(True, "float32", ranks)


def test_spilling_has_no_race() -> None:
    (loss,) = launch_ranks(sanitized, "", size=1, device_type=ON)
    (on_cpu,) = launch_ranks(steps, False, "float32", size=1)
    assert loss == pytest.approx(on_cpu, rel=1e-4)


@needs_a_gpu
def test_a_race_would_be_seen() -> None:
    with pytest.raises(RanksFailedError, match="CUDASanitizerErrors"):
        launch_ranks(sanitized, "compute_after", size=1, device_type=ON)


def test_bf16_spilled_is_bf16_in_memory(tmp_path: Path) -> None:
    """To the tolerance of the format: on a GPU some sums may be in any order."""
    a_job = job(load_model="tiny:llama", hparams=HParams(batches=8, precision="bf16", accumulate=2))
    strategies = [
        Strategy("single"),
        Strategy("spill"),
        Strategy("spill", 1, {"stay": 2}),
        Strategy("spill", 1, {"resident": 9}),
    ]
    single, *spilled = run(
        [(train_request(a_job, s, tmp_path / str(n)), 1) for n, s in enumerate(strategies)], ON
    )
    for outcome in spilled:
        losses, _ = deviation(single, outcome)
        assert losses <= (2e-2 if ON == "cuda" else 0.0)


@pytest.mark.skipif(ON == "cuda" and torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_bf16_gathers_train_as_one_device_does(tmp_path: Path) -> None:
    a_job = job(load_model="tiny:llama", hparams=HParams(batches=8, precision="bf16", accumulate=2))
    strategies = [Strategy("single"), Strategy("fsdp", 2), Strategy("fsdp", 2, {"recompute": True})]
    requests = [(train_request(a_job, s, tmp_path / str(n)), s.devices) for n, s in enumerate(strategies)]
    single, *sharded = run(requests, ON)
    for outcome in sharded:
        losses, _ = deviation(single, outcome)
        assert losses <= 2e-2


def test_checkpoints_while_spilling_change_nothing(tmp_path: Path) -> None:
    a_job = job(hparams=HParams(batches=6, precision="float64", lr=1e-2))
    none = train_request(a_job, Strategy("spill"), tmp_path / "none")
    each = train_request(a_job, Strategy("spill"), tmp_path / "each", checkpoint_batches=1)
    without, with_them = run([(none, 1), (each, 1)], ON)
    assert max(deviation(without, with_them)) <= 1e-10


def frozen_base(width: int, ranks: Ranks) -> tuple[int, int, int]:
    """Train a small adapter behind each of many frozen matrices: bytes of these, the most on the device, and
    how many of the frozen have a gradient."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(width, width).requires_grad_(False)
            self.a, self.b = nn.Linear(width, 4), nn.Linear(4, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.base(x) + self.b(self.a(x))

    model = nn.Sequential(nn.Linear(width, width), *(Adapted() for _ in range(24)))
    parallel = made(True, model, ranks)
    objective = Objective(Job("j", "x:y", "x:y", "test_cuda_limits:mean_square"), model, ranks.device)
    optimizer = torch.optim.AdamW(parallel.trainable().values(), lr=1e-3, fused=True)
    x = torch.randn(8, width)
    for _ in range(3):
        parallel.backward(objective, [x, x], 8, 1 / 8, True)
        parallel.finish_gradients()
        optimizer.step()
        frozen = [p for p in model.parameters() if not p.requires_grad]
        with_gradient = sum(p.grad is not None for p in frozen)
        parallel.drop_gradients()
    most = torch.cuda.max_memory_allocated() if ranks.device.type == "cuda" else 0
    return sum(p.numel() * p.element_size() for p in frozen), most, with_gradient


def test_what_is_frozen_costs_the_device_nothing() -> None:
    ((frozen, most, with_gradient),) = launch_ranks(
        frozen_base, 2048 if ON == "cuda" else 64, size=1, device_type=ON
    )
    assert with_gradient == 0
    assert most < frozen / 2


GREEDY = job(load_model="tiny:plain", load_dataloader="tiny:vectors", loss_function="test_cuda_limits:greedy")


def greedy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that wants a pebibyte of the device."""
    return outputs.mean() + outputs.new_empty(2**50, dtype=torch.uint8).sum()


def test_training_that_runs_out_of_memory_says_so_and_leaves_the_device_free(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as raised:
        run([(train_request(GREEDY, Strategy("single"), tmp_path / "greedy"), 1)], ON)
    assert raised.value.failure.status == "out_of_memory"
    a_job = job(hparams=HParams(batches=2, precision="float64"))
    run([(train_request(a_job, Strategy("single"), tmp_path / "modest"), 1)], ON)


def tried(a_job: Job, technique: str, tmp_path: Path) -> Any:
    if ON == "cuda":
        pytest.importorskip("pynvml")
    node = Node("here", devices=1, kind="gpu" if ON == "cuda" else "cpu")
    trial = Trial(
        job=a_job, technique=technique, devices=1, node="here", covers=(a_job.name,), fingerprint="abc"
    )
    folders: dict[str, Any] = {"folder": tmp_path / technique, "leases_folder": str(tmp_path / "leases")}
    return measure(trial, node, path=(str(Path(__file__).parent),), **folders)


def test_a_trial_that_runs_out_of_memory_is_an_answer(tmp_path: Path) -> None:
    found = tried(GREEDY, "single", tmp_path)
    assert not found.works
    assert found.reason.startswith("out of memory")
    assert not found.passing


@pytest.mark.parametrize("technique", ["single", "spill"])
def test_a_trial_measures(technique: str, tmp_path: Path) -> None:
    found = tried(job(hparams=HParams(batches=50)), technique, tmp_path)
    assert found.works, found.reason
    assert found.peak_device_bytes > 0


@needs_a_gpu
def test_another_process_on_a_gpu_is_seen() -> None:
    from saturn_airflow.launch import devices

    pytest.importorskip("pynvml")
    uuid = devices.gpu_uuids()[0]
    code = (
        "import torch, sys; kept = torch.zeros(3 * 2**30, dtype=torch.uint8, device='cuda'); "
        "torch.cuda.synchronize(); print('here', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "here\n"
        used, total = devices.used_bytes([uuid])[uuid]
        assert 3 * 2**30 < used <= total
        if used > 0.05 * total:
            told = devices.wait_until_free([uuid], lambda: False, seconds=0.5)
            assert f"of {uuid} are in use by processes that are not Saturn's" in told
        stranger.communicate("")
    time.sleep(1.0)
    assert devices.used_bytes([uuid])[uuid][0] < used


def allocator_settings(ranks: Ranks) -> str:
    torch.zeros(1, device=ranks.device)
    return torch._C._accelerator_getAllocatorSettings()


@needs_a_gpu
def test_ranks_take_memory_in_segments_that_grow() -> None:
    """The process that ranks are forked from has torch imported, which is not to have settled it."""
    (found,) = launch_ranks(allocator_settings, size=1, device_type="cuda")
    assert "expandable_segments:True" in found


@needs_a_gpu
def test_doctor_sees_what_torch_sees(tmp_path: Path) -> None:
    from saturn_airflow.deployment import survey
    from saturn_airflow.launch import devices

    pytest.importorskip("pynvml")
    assert len(devices.gpu_uuids()) == torch.cuda.device_count()
    assert survey.torch_cuda() == torch.version.cuda
    driver = devices.driver_cuda()
    assert driver is not None
    assert driver >= tuple(map(int, str(torch.version.cuda).split(".")))[:1]
    (found,) = launch_ranks(name_of_the_gpu, size=1, device_type="cuda")
    assert found in devices.gpus().values()
    assert survey.cuda_error() is None


def name_of_the_gpu(ranks: Ranks) -> str:
    return torch.cuda.get_device_name(ranks.device)
