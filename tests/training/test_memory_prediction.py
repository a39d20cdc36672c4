"""Predicting memory: near what arithmetic says, without taking it, and used to refuse what is hopeless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from saturn_airflow.launch import devices
from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.library import Parameters, get
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

MIB = 2**20
WIDTH, DEPTH = 2048, 40
WEIGHTS = DEPTH * WIDTH * (WIDTH + 1) * 4  # bytes: 640 MiB
# Weights, gradients and AdamW's two moments.
STATE = 4 * WEIGHTS


def request(technique: str, **parameters: Any) -> TrainRequest:
    job = Job(
        "wide",
        load_model="memory_jobs:wide",
        load_dataloader="memory_jobs:rows",
        loss_function="memory_jobs:mean",
        model_args={"width": WIDTH, "depth": DEPTH},
        data_args={"width": WIDTH},
        hparams=HParams(batch_size=8),
    )
    return TrainRequest(job=job, technique=technique, parameters=parameters)


def predict_all(requests: list[TrainRequest], this_process: Ranks) -> tuple[list[int | None], int]:
    """Predictions, and how much memory this process had at most."""
    import torch.distributed as dist

    from saturn_airflow.training import memory_prediction

    found = []
    for one in requests:
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=this_process.size)
        found.append(memory_prediction.predict(one, this_process))
    return found, psutil.Process().memory_info().rss


def test_is_near_what_arithmetic_says_without_taking_it() -> None:
    (alone, unknown), used = ranks.launch(predict_all, [request("single"), request("spill")], size=1)[0]
    of_two = [request("fsdp"), request("fsdp", recompute=True)]
    (shared, recomputed), _ = ranks.launch(predict_all, of_two, size=2)[0]
    assert alone is not None
    assert shared is not None
    assert recomputed is not None
    assert STATE < alone < 1.1 * STATE
    assert STATE / 2 < shared < 0.65 * STATE
    assert recomputed <= shared
    assert unknown is None
    assert used < WEIGHTS


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_is_no_more_than_flash_attention_takes(as_module: bool, precision: str) -> None:
    width, heads, tokens, batch = 64, 4, 1024, 2
    job = Job(
        "attends",
        load_model="memory_jobs:Attending",
        load_dataloader="memory_jobs:sequences",
        loss_function="memory_jobs:mean",
        model_args={"width": width, "heads": heads, "as_module": as_module},
        data_args={"width": width, "tokens": tokens},
        hparams=HParams(batch_size=batch, precision=precision),
    )
    asked = TrainRequest(job=job, technique="single", parameters={})
    (found,), _ = ranks.launch(predict_all, [asked], size=1)[0]
    one_tensor = batch * tokens * width * 4
    scores = batch * heads * tokens * tokens * 4  # of which other ways hold several
    assert found is not None
    assert 4 * one_tensor < found < 16 * one_tensor + (tokens * tokens * 4 if as_module else 0) < 2 * scores


def test_blocks_are_counted_without_their_memory() -> None:
    found = ranks.launch("saturn_airflow.training.memory_prediction:blocks", request("spill"), size=1)
    assert found == [(DEPTH, STATE // DEPTH)]


class DirectSession:
    """Launches ranks as a session does."""

    folder = Path()

    def launch(self, function: Any, *arguments: Any) -> list[Any]:
        return ranks.launch(function, *arguments, size=1)

    def fastest(self, candidates: Any) -> tuple[Parameters, float]:
        return candidates[0], 1.0


@pytest.mark.parametrize("device_bytes", [STATE // 2, 2 * STATE, None])
def test_search_refuses_only_what_is_hopeless(
    monkeypatch: pytest.MonkeyPatch, device_bytes: int | None
) -> None:
    monkeypatch.setattr(devices, "smallest_gpu_bytes", lambda: device_bytes)
    session: Any = DirectSession()
    job = request("single").job
    if device_bytes == STATE // 2:
        with pytest.raises(
            DoesNotFit, match=r"its tensors alone take 2\.\d GiB on each of 1 devices, which have 1\.3 GiB"
        ):
            get("single").search(job, [0], session)
    else:
        assert get("single").search(job, [0], session) == ({}, 1.0)
