"""How the losses of a batch's parts make up the loss of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Literal

import torch
import torch.distributed as dist

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.training.losses.means import Count


@dataclass(frozen=True)
class Rule:
    """What the loss of a batch is, by those of its parts.

    :param kind: ``"samples"``: their mean, by samples; ``"labels"``: their mean, by what the one mean in it
        is a mean over; ``"sum"``: their sum, in which each mean is taken over all parts.
    :param means: how many there are in the loss, where each must be over the same number of things for every
        sample of a batch; None where that is not asked for.
    :param seen: of ``"sum"``, how many there were when it was looked at: the ranks take them one by one.
    """

    kind: Literal["samples", "labels", "sum"]
    means: int | None = None
    seen: int | None = field(default=None, compare=False)


SAMPLES, LABELS, SUM = Rule("samples"), Rule("labels"), Rule("sum")


@dataclass
class LossMeans:
    """The means in the loss of one part of a batch, as they are computed, and what that loss comes to.

    :param samples: of the part; 0 where it is a stand-in.
    :param batch_samples: of the global batch.
    :param over: of ``"sum"``, for each mean, what to divide by; None for the count of all ranks' parts.
    :param group: of the ranks that have parts; None where there is one.
    :param scale: what each mean is multiplied by, to see what the loss makes of smaller ones.
    """

    rule: Rule
    samples: int = 0
    batch_samples: int = 0
    device: torch.device | None = None
    over: Sequence[Count] | None = None
    group: dist.ProcessGroup | None = None
    scale: float = 1.0
    values: list[torch.Tensor] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    loss: torch.Tensor | None = None
    over_given: torch.Tensor | None = None

    @property
    def uses_means(self) -> bool:
        """Whether the means make a difference."""
        return self.rule != SAMPLES

    def mean(self, total: torch.Tensor, count: Count) -> torch.Tensor:
        """What stands for a mean while the loss is computed: its own, or its part of the one of all."""
        number = len(self.counts)
        self.counts.append(count)
        if self.rule.kind != "sum":
            # 0 where there is nothing to take the mean of.
            some = torch.where(count != 0, count, 1) if isinstance(count, torch.Tensor) else count or 1
            value = total / some
        elif self.over is not None:
            value = total / (self.over[number] if number < len(self.over) else math.nan)
        else:
            if self.loss is None and self.rule.seen is not None and number >= self.rule.seen:
                raise self._other_means()
            # A clone, for the count may be the job's own tensor. A stand-in counts for nothing, and yet takes
            # part: the other ranks wait for it.
            everyones = as_scalar(count, total.device).clone()
            everyones *= bool(self.samples)
            if self.group is not None and self.group.size() > 1:
                dist.all_reduce(everyones, group=self.group)
            value = total / everyones.to(total.dtype)
        if self.scale != 1.0:
            value = value * self.scale
        self.values.append(value.detach())
        return value

    def summed(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A part's loss as a sum and what it is a sum over; those of all parts make up the batch's.

        :raises DoesNotFit: when the loss holds other means than the rule has.
        """
        self.loss = loss.detach()
        if self.rule.kind == "sum":
            self.check_number()
            # Over all parts: the losses' sum times B, over B samples.
            return loss * self.batch_samples, self._scalar(self.samples)
        if self.rule.kind == "labels":
            if len(self.counts) != 1:
                raise self._other_means()
            return loss * self.counts[0], self._scalar(self.counts[0])
        return loss * self.samples, self._scalar(self.samples)

    def check_number(self) -> None:
        """Check that all means were there that other ranks wait for.

        :raises DoesNotFit: when they were not.
        """
        if self.over is None and self.rule.seen not in (None, len(self.counts)):
            raise self._other_means()

    def _other_means(self) -> DoesNotFit:
        seen = "one mean" if self.rule.seen is None else f"{self.rule.seen} means"
        return DoesNotFit(
            f"the loss held {seen} when it was looked at, and now {len(self.counts)}: Saturn can't "
            "tell how parts of a batch make it up; return it as a pair (sum, count)"
        )

    def as_given(self, total: torch.Tensor, over: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair that a loss function returned."""
        self.loss, self.over_given = total.detach(), self._scalar(over)
        return total, self.over_given

    def tally(self) -> torch.Tensor:
        """What :func:`check` wants to know of this part: summed over all parts of a batch."""
        means = self.rule.means
        if means is None:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        if not self.samples or len(self.counts) != means:
            tally = torch.zeros(2 + 2 * means, dtype=torch.float64, device=self.device)
            tally[1] = float(bool(self.samples))
            return tally
        counts = [self._scalar(count) for count in self.counts]
        squares = [count**2 / self.samples for count in counts]
        return torch.stack([self._scalar(self.samples), self._scalar(0.0), *counts, *squares])

    def _scalar(self, value: Any) -> torch.Tensor:
        return as_scalar(value, self.device).detach()


def as_scalar(value: Any, device: torch.device | None) -> torch.Tensor:
    """A number, or a tensor of one, in float64 on ``device``."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and device not in (None, value.device):
        value = value.item()  # which the host knows
    if isinstance(value, Number):
        # Filled on the device: a copy from the host would wait for all that the device has to do.
        return torch.full((), float(value), dtype=torch.float64, device=device)  # type: ignore[arg-type]
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def check(tally: Sequence[float], when: str) -> None:
    """Check what the parts of a batch have tallied: that their rule holds for it.

    :raises DoesNotFit: when a mean is over more things for some samples than for others.
    """
    if not tally:
        return
    samples, surprises, *rest = tally
    counts, squares = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    # By Cauchy and Schwarz these are equal only where counts are in proportion to samples.
    even = all(math.isclose(s * samples, c**2, rel_tol=1e-9) for c, s in zip(counts, squares, strict=True))
    if surprises or not even:
        raise DoesNotFit(
            f"{when} the means in the loss are over more things for some samples than for others, beside "
            "what is a mean over samples, so parts can't be put together; return a pair (sum, count)"
        )
