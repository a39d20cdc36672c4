"""How the losses of a batch's parts make up the loss of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from saturn_airflow.training.means import Count
from saturn_airflow.training.request import DoesNotFit


@dataclass(frozen=True)
class Rule:
    """What the loss of a batch is, by those of its parts.

    :param kind: ``"samples"``: their mean, by samples; ``"labels"``: their mean, by what the one mean in it
        is a mean over; ``"sum"``: their sum, in which each mean is taken over all parts.
    :param ratios: of ``"samples"``, for each mean in the loss: how many things each sample adds to it.
    """

    kind: Literal["samples", "labels", "sum"]
    ratios: tuple[float, ...] | None = None


SAMPLES, LABELS, SUM = Rule("samples"), Rule("labels"), Rule("sum")


@dataclass
class Heard:
    """The means in the loss of one part of a batch, as they are computed, and what that loss comes to.

    :param samples: of the part; 0 where it is a stand-in.
    :param batch_samples: of the global batch.
    :param over: of ``"sum"``, for each mean, what to divide by; None for the count of all ranks' parts.
    """

    rule: Rule
    samples: int = 0
    batch_samples: int = 0
    device: torch.device | None = None
    over: Sequence[Count] | None = None
    values: list[torch.Tensor] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    loss: torch.Tensor | None = None
    over_given: torch.Tensor | None = None

    @property
    def listens(self) -> bool:
        """Whether the means make a difference."""
        return self.rule != SAMPLES

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must compute the loss together, even those without samples."""
        divides_by_all = self.rule == SUM and self.over is None
        return divides_by_all and dist.is_initialized() and dist.get_world_size() > 1

    def mean(self, total: torch.Tensor, count: Count) -> torch.Tensor:
        """What stands for a mean while the loss is computed: its own, or its part of the one of all."""
        number = len(self.counts)
        self.counts.append(count)
        if self.rule.kind != "sum":
            # 0 where there is nothing to take the mean of.
            some = torch.where(count > 0, count, 1) if isinstance(count, torch.Tensor) else count or 1
            value = total / some
        elif self.over is not None:
            value = total / (self.over[number] if number < len(self.over) else math.nan)
        else:
            everyones = torch.as_tensor(count, dtype=torch.float64, device=total.device).clone()
            everyones *= bool(self.samples)
            if self.is_collective:
                dist.all_reduce(everyones)
            value = total / everyones.to(total.dtype)
        self.values.append(value.detach())
        return value

    def summed(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A part's loss as a sum and what it is a sum over; those of all parts make up the batch's.

        :raises DoesNotFit: when the loss holds other means than the rule has.
        """
        self.loss = loss.detach()
        if self.rule.kind == "sum":
            return loss * self.batch_samples, self._scalar(self.samples)
        if self.rule.kind == "labels":
            if len(self.counts) != 1:
                raise DoesNotFit(
                    f"the loss held one mean when it was looked at, and now {len(self.counts)}: Saturn can't "
                    "tell how parts of a batch make it up; return it as a pair (sum, count)"
                )
            return loss * self.counts[0], self._scalar(self.counts[0])
        return loss * self.samples, self._scalar(self.samples)

    def as_given(self, total: torch.Tensor, over: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair that a loss function returned."""
        self.loss, self.over_given = total.detach(), self._scalar(over)
        return total, self.over_given

    def strays(self) -> Any:
        """How many things means were taken over beyond what :attr:`Rule.ratios` has for them."""
        if self.rule.ratios is None or not self.samples:
            return 0.0
        if len(self.counts) != len(self.rule.ratios):
            return 1.0
        strays: Any = 0.0
        for count, ratio in zip(self.counts, self.rule.ratios, strict=True):
            expected: Any = self.samples * ratio
            strays = strays + (abs(count - expected) > 1e-6 * (1 + expected))
        return strays

    def _scalar(self, value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
