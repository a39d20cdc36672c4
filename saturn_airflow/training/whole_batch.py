"""The whole batch in a training step of the job's own, wherever its samples are computed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from saturn_airflow.model.errors import JobError
from saturn_airflow.training.ranks import Ranks

# The ranks that share the batch of the step that is being taken, how many samples this one has, and whether
# the last rank has the first ones.
_shared: tuple[Ranks, int, bool] | None = None


def begin(ranks: Ranks, samples: int, turned: bool = False) -> None:
    """Begin with a step of which this rank computes ``samples``.

    :param turned: whether the last rank has the batch's first samples.
    """
    global _shared
    _shared = (ranks, samples, turned)


def end() -> None:
    """End with the step."""
    global _shared
    _shared = None


def is_shared() -> bool:
    """Whether a step is taken, of which this rank computes but a part."""
    return _shared is not None and _shared[0].size > 1


def whole_batch(values: torch.Tensor) -> torch.Tensor:
    """The values of all samples of the global batch, in the order of its samples, without gradients.

    To be called in ``training_step``, on all ranks together. On one device, and outside of Saturn, that is
    ``values`` themselves: write a queue or a running mean over the batch with it, and it is the same however
    many devices there are::

        keys = whole_batch(self.key_encoder(images))

    :param values: of this device's samples, of shape (samples, ...).
    :raises JobError: when it holds another number of samples.
    """
    values = values.detach()
    if _shared is None or not is_shared():
        return values
    ranks, samples, turned = _shared
    if not values.ndim or len(values) != max(samples, 1):
        raise JobError(
            f"whole_batch was given values of shape {tuple(values.shape)} where this device has {samples} "
            "samples; give it one row for each sample"
        )
    counts = torch.zeros(ranks.size, dtype=torch.long, device=values.device)
    counts[ranks.rank] = samples
    dist.all_reduce(counts, group=dist.group.WORLD)
    there = counts.tolist()
    padded = values.new_zeros(max(there), *values.shape[1:])
    padded[:samples] = values[:samples]
    everyones = [torch.empty_like(padded) for _ in there]
    dist.all_gather(everyones, padded, group=dist.group.WORLD)
    rows = [part[:count] for part, count in zip(everyones, there, strict=True)]
    return torch.cat(rows[::-1] if turned else rows)
