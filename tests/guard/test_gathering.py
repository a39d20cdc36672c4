"""Sharded tensors come back whole, however they are cut, and in few messages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding import gathering
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.ranks

SHAPES = [(7, 2), (1,), (2, 5), (0, 3), (3,), (6, 4), (2, 2, 2)]


def gather(ranks: Ranks) -> tuple[list[bool], int]:
    """Whether each tensor is whole again, and how many messages it took."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    wholes = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in SHAPES]
    cut = [Shard(number % whole.ndim) for number, whole in enumerate(wholes)]
    split = [distribute_tensor(whole, mesh, [by]) for whole, by in zip(wholes, cut, strict=True)]
    split.append(distribute_tensor(wholes[0], mesh, [Replicate()]))
    messages, own = [0], dist.all_gather_single

    def counted(*args: object, **kwargs: object) -> object:
        messages[0] += 1
        return own(*args, **kwargs)

    dist.all_gather_single = counted
    plain = torch.ones(2)
    found = list(gathering.dense([*split, plain]))
    return [torch.equal(a, b) for a, b in zip(found, [*wholes, wholes[0], plain], strict=True)], messages[0]


@pytest.mark.parametrize("size", [2, 3])
def test_shards_come_back_whole(size: int) -> None:
    for same, messages in ranks_module.launch(gather, size=size):
        assert same == [True] * (len(SHAPES) + 2)
        assert messages == 1
