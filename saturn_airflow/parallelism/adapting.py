"""From what a technique's ``parallelize`` returned to what the training loop works with."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.errors import JobError
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.replicating import Replicated
from saturn_airflow.parallelism.sharding import Sharded
from saturn_airflow.training.ranks import Ranks


def adapt(returned: Any, model: nn.Module, ranks: Ranks, technique: str) -> Parallel:
    """What a technique's ``parallelize`` returned, as a :class:`Parallel`.

    :raises JobError: when it is nothing that the loop knows how to train with.
    """
    if isinstance(returned, Parallel):
        return returned
    if isinstance(returned, DistributedDataParallel):
        return Replicated(model, ranks, returned, share=ranks.rank, shares=ranks.size)
    if isinstance(returned, FSDPModule) and isinstance(returned, nn.Module):
        return Sharded(model, ranks, returned)
    if isinstance(returned, nn.Module) and ranks.size == 1:
        return Parallel(model, ranks, returned)
    raise JobError(
        f"technique {technique!r}: parallelize returned a {type(returned).__name__}; on several devices "
        "return a module wrapped by DistributedDataParallel or fully_shard, "
        "or a saturn_airflow.parallelism.parallel.Parallel"
    )


def refuse_copies(parallel: Parallel, technique: str) -> None:
    """See that what is trained are parameters of the model: checkpoints have those, by their names.

    :raises DoesNotFit: when they are others, such as copies on another device.
    """
    own = {id(p) for p in parallel.model.parameters()}
    if others := [name for name, p in parallel.trainable().items() if id(p) not in own]:
        raise DoesNotFit(
            f"technique {technique!r}: trainable() gives in the place of {others[0]!r} a tensor that is no "
            "parameter of the model. A checkpoint has the model's, and what the optimizer keeps of those: a "
            "job that is resumed would lose what was trained. Let trainable() give the model's own, and copy "
            "what is computed with"
        )
