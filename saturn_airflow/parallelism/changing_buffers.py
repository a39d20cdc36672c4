"""What forward passes change, such as moving averages: exact only where a batch makes one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.jobs import AS_MICRO_BATCHES, Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.optim.plain_values import equal_tensors

_SAMPLED = 256  # numbers of each buffer that ranks compare


class ChangingBuffers:
    """Watches a step's micro-batches for buffers that would not be those of the whole batch.

    A cache that the first pass fills is none of those, nor are a BatchNorm's that looks at the whole batch,
    nor what each micro-batch may change since that is the job's result.
    """

    def __init__(self, parallel: Parallel, job: Job) -> None:
        self._parallel = parallel
        self._in_micro_batches = job.in_micro_batches
        self._first: dict[str, torch.Tensor] | None = None
        self._versions: dict[str, int] = {}

    def look(self, *, last: bool) -> None:
        """Look at the buffers after a micro-batch; every rank must call this together.

        :raises DoesNotFit: when some follow the samples of a share or of a micro-batch.
        """
        buffers = {name: buffer.detach() for name, buffer in self._parallel.model.named_buffers()}
        if self._first is not None:
            if last and not self._in_micro_batches:
                self._compare_passes(self._first, buffers)
                self._compare_versions()
            return
        self._compare_shares(buffers)
        self._first = {} if last else {name: buffer.clone() for name, buffer in buffers.items()}
        self._versions = {name: p._version for name, p in self._frozen()}

    def _frozen(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that no optimizer changes, as a teacher's, where they are whole."""
        for name, parameter in self._parallel.model.named_parameters():
            if not parameter.requires_grad and not isinstance(parameter, DTensor):
                yield name, parameter

    def _compare_versions(self) -> None:
        for name, parameter in self._frozen():
            if parameter._version != self._versions[name]:
                raise DoesNotFit(
                    f"parameter {name!r} is changed in every forward pass, of which accumulate makes several "
                    "for each batch; set accumulate to 1, change it after the optimizer's steps, "
                    f"{AS_MICRO_BATCHES}"
                )

    def _compare_passes(self, first: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
        for name, buffer in first.items():
            if name in now and buffer.shape == now[name].shape and not equal_tensors(buffer, now[name]):
                raise DoesNotFit(
                    f"buffer {name!r} changes in every forward pass, of which accumulate makes several for "
                    f"each batch; set accumulate to 1, freeze what changes it, {AS_MICRO_BATCHES}"
                )

    def _compare_shares(self, buffers: dict[str, torch.Tensor]) -> None:
        ranks = self._parallel.ranks
        if self._parallel.shares == 1 or ranks.size == 1 or not buffers:
            return
        own = {name: _sample(buffer) for name, buffer in buffers.items()}
        everyones = ranks.everyones(own)
        for name, sample in everyones[0].items():
            for other in everyones[1:]:
                if name in other and len(other[name]) == len(sample) and not _close(sample, other[name]):
                    raise DoesNotFit(
                        f"buffer {name!r} comes out otherwise on each device: it follows the samples that a "
                        "device sees, of which each has a share of the batch, or is drawn at random; train "
                        "on one device, or under a technique that does not share batches"
                    )


def _sample(buffer: torch.Tensor) -> list[float]:
    flat = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).flatten()
    numbers: list[float] = flat[:: max(1, flat.numel() // _SAMPLED)].double().tolist()
    return numbers


def _close(one: list[float], other: list[float]) -> bool:
    """Whether they differ by no more than sums in another order do."""
    ones, others = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    return torch.allclose(ones, others, rtol=1e-5, atol=1e-8, equal_nan=True)
