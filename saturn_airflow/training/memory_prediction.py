"""How much memory training will take, told without taking it.

The training step is run on fake tensors, which have shapes and no data, as rank 0 of ranks that do not exist.
``torch.distributed._tools``, the fake tensors and the fake process group are private parts of torch (seen in
2.13): nothing else in Saturn may use them, and when they fail, there is no prediction and nothing is lost.

Predictions are of what tensors take. What allocators and libraries need comes on top (up to a fifth was
seen), so they serve to reject what is hopeless, never to promise that something fits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from saturn_airflow import library
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.parallelism import adapting, caches, parallel, recomputation
from saturn_airflow.parallelism.blocks import find_blocks
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.training import loading, precision
from saturn_airflow.training.attention_stand_in import lean_attention
from saturn_airflow.training.batches import Cut, Position
from saturn_airflow.training.load_data import load_data
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.nested import map_tensors
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.ranks import Ranks

_STEPS = 2  # the optimizer's state comes with the first


def predict(request: TrainRequest, ranks: Ranks) -> int | None:
    """Bytes that tensors take at most on one of ``ranks.size`` devices; None where that can't be told.

    Every rank calls this; the first one predicts, and the ranks can't talk to each other any more.
    """
    if not ranks.is_first:
        return None
    dist.destroy_process_group()
    job = request.job
    # Fake tensors on "cuda" need a build with CUDA; what counts is how many there are, not where.
    ranks = Ranks(rank=0, size=ranks.size, device=torch.device("cpu"))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks.size)
    # There is nothing to compare where tensors have no data.
    recomputation.checked_calls = 0
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    data = load_data(job, job.load_dataloader)
    with mode:
        model = precision.cast_model(loading.made(job), job.hparams.precision)
        caches.switch_off(model)
        # It is there already, and fake weights can't be swapped.
        model.to = lambda *args, **kwargs: model  # type: ignore[method-assign]
        groups = optimizers.parameter_groups(job.hparams, model)
        objective = Objective(job, model, ranks.device)
    if request.technique == "ddp":
        # It looks at the data of weights. Each rank needs what one device needs for its share of the batch.
        adapted = parallel.Parallel(model, ranks, shares=ranks.size)
    else:
        returned = library.get(request.technique).parallelize(model, ranks, **request.parameters)
        adapted = adapting.adapt(returned, model, ranks, request.technique)
    if request.technique in ("pipeline", "spill") or request.parameters.get("offload"):
        return None
    # It is tried on small tensors that are real.
    optimizer = optimizers.make_optimizer(job.hparams, groups, adapted)
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False  # it works in place, for which tensors without memory would show copies
    cut = Cut(job.hparams.accumulate, adapted.share, adapted.shares)
    with data.aside():
        batch = next(data.batches(Position(), cut, 1))
    prepared, count = objective.prepare(batch.micro_batches[0].data, max(1, batch.micro_batches[0].samples))
    fake_batch = map_tensors(mode.from_tensor, prepared)
    tracker = MemTracker()
    tracker.track_external(adapted.module, optimizer)
    with mode, tracker, lean_attention():
        for _ in range(_STEPS):
            total, _ = objective(adapted.module, fake_batch, count)
            adapted.run_backward(total / count, count, True)
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")
    return sum(int(kinds["Total"]) for kinds in peak.values())


# Weights, gradients, and the two moments of Adam.
_OF_TRAINED = 4


def blocks(request: TrainRequest, ranks: Ranks) -> tuple[int, int]:
    """How many blocks a job's model has, and the bytes that the largest takes while it is trained."""
    job = request.job
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = precision.cast_model(loading.made(job), job.hparams.precision)
        sizes = [
            sum(
                p.numel() * p.element_size() * (_OF_TRAINED if p.requires_grad else 1)
                for p in parameters_of(b)
            )
            for _, b in find_blocks(model)
        ]
    return len(sizes), max(sizes, default=1)
