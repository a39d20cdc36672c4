"""DeepSpeed's offloading as gpu.py holds Saturn against it: ZeRO stage 3, weights and optimizer on the host.

Untried: it was written by DeepSpeed's documentation of its configuration, on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from typing import Any

import torch
from gpu_jobs import data, loss
from gpu_plain import Phases, cap_memory

from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training.loading import load_model
from saturn_airflow.training.ranks import Ranks


def why_not(device_type: str) -> str | None:
    """Why it can't be measured here; None where it can."""
    if device_type != "cuda":
        return "it is held against on GPUs alone"
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install deepspeed; it compiles its Adam with nvcc)"
    return None


def settings(batch_size: int, lr: float) -> dict[str, Any]:
    """For one GPU: bf16, pinned memory, its own Adam for CPUs, copies beside what is computed."""
    on_host = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": on_host,
            "offload_optimizer": on_host,
            "sub_group_size": 100_000_000,
            "stage3_prefetch_bucket_size": 200_000_000,
            "stage3_max_live_parameters": 1_000_000_000,
        },
        "steps_per_print": 1_000_000,
    }


def train_with_deepspeed(request: TrainRequest, cap: int | None, ranks: Ranks) -> dict[str, Any]:
    """Train with its engine, on the weights and batches of the others: seconds per batch and losses."""
    import deepspeed  # type: ignore[import-not-found]

    cap_memory(cap, ranks)
    # It reads them even where the process group is there.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    a_job, measure = request.job, request.measure
    assert measure is not None
    batch_size = a_job.hparams.batch_size
    assert batch_size is not None
    built: Any = load_model(a_job)
    built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(
        model=built,
        model_parameters=built.parameters(),
        config=settings(batch_size, a_job.hparams.lr),
        dist_init_required=False,
    )
    engine.train()
    loader = data(batch_size=batch_size, **a_job.data_args)
    seconds: list[float] = []
    losses: list[float] = []
    phases = Phases(ranks.device, measure.warmups)
    batches = (batch for _ in iter(int, 1) for batch in loader)
    while len(seconds) < measure.warmups + measure.batches:
        began = time.perf_counter()
        batch = {name: rows.to(ranks.device, non_blocking=True) for name, rows in next(batches).items()}
        phases.mark("forward")
        value = loss(engine(input_ids=batch["input_ids"]), batch)
        phases.mark("backward")
        engine.backward(value)
        phases.mark("optimizer")
        engine.step()
        phases.mark("rest")
        losses.append(value.item())
        torch.cuda.synchronize(ranks.device)
        seconds.append(time.perf_counter() - began)
        phases.end_step()
    counted = seconds[measure.warmups :]
    spread = statistics.quantiles(counted, n=4)
    return {
        "seconds_per_batch": statistics.fmean(counted),
        "spread": (spread[2] - spread[0]) / spread[1],
        "losses": losses,
        "phases": phases.means(),
    }
