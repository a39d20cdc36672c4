"""Running a model's stages, one per rank: the schedule, and the gradients that stages have in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow.launch import job_log
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.errors import JobError
from saturn_airflow.parallelism import anatomy, stages
from saturn_airflow.parallelism.neighbours import Neighbours
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.stages import Stage, StageOutputs
from saturn_airflow.training import batches, rng
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.nested import map_tensors
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.without_group import without_group

Pair = tuple[torch.Tensor, torch.Tensor]
Piece = tuple[Any, int, tuple[int, ...]]


class Pipelined(Parallel):
    """One stage of a model per rank.

    :param micro_batches: pieces that every micro-batch of the loop is cut into.
    :param schedule: ``"1f1b"`` or ``"gpipe"``.
    :param cuts: the blocks that the second stage and those after it begin with; None to choose them.
    """

    wants_example = True

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        micro_batches: int,
        schedule: str,
        cuts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(model, ranks)
        assert schedule in ("1f1b", "gpipe"), schedule
        self.pieces = micro_batches
        self._schedule = schedule
        self._cuts = cuts
        self._is_last = ranks.rank == ranks.size - 1
        job_log.tell_losses(self._is_last)
        self._neighbours = Neighbours(ranks)
        self._common: list[_Common] = []

    def prepare(self, objective: Objective, batch: Any, samples: int) -> None:
        """Cut the model, the same way everywhere, after following a first piece of the batch through it."""
        example, over = next(self._cut(objective, batch, samples))
        self.model.train()
        with without_group():
            found = anatomy.examine(
                self.model, lambda: objective(self.model, example, over), self.ranks.device
            )
        cuts = stages.choose_cuts(found, self.ranks.size) if self._cuts is None else self._cuts
        stages.check_cuts(found, cuts, self.ranks.size)
        self.decided = {"cuts": list(cuts)}
        holders = stages.holders(found, cuts, self.model)
        self._common = _common(holders, self.ranks)
        own = range(*[0, *cuts, len(found.blocks)][self.ranks.rank : self.ranks.rank + 2])
        keep = {p for p, held_by in holders.items() if self.ranks.rank in held_by}
        self._stage = Stage(self.model, found, own, keep, self.ranks.device)

    def backward(self, objective: Objective, batch: Any, samples: int, scale: float, last: bool) -> Pair:
        """Run the schedule over the pieces of a micro-batch; only the last stage returns sums that are not
        0."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        pieces = self._numbered(objective, batch, samples)
        running: deque[tuple[StageOutputs, Any]] = deque()
        # GPipe runs all pieces forward before the first goes backward. With 1F1B a stage has no more under
        # way than there are stages from it to the last; then each further one waits for the oldest to go
        # backward.
        ahead = len(pieces)
        if self._schedule == "1f1b":
            ahead = min(ahead, self.ranks.size - self.ranks.rank)
        with self._neighbours.sending():
            for number, piece in enumerate(pieces):
                if number >= ahead:
                    self._backward(*running.popleft())
                arrived, result = self._forward(objective, *piece)
                if self._is_last:
                    total, over = result
                    sums.add_(torch.stack([total.detach().to(sums), over.to(sums)]))
                    result = total * scale
                running.append((arrived, result))
            while running:
                self._backward(*running.popleft())
        return sums[0], sums[1]

    def evaluate(self, objective: Objective, batch: Any, samples: int) -> Pair:
        """Run all pieces forward, one after the other; only the last stage returns sums that are not 0."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        with self._neighbours.sending():
            for piece in self._numbered(objective, batch, samples):
                _, result = self._forward(objective, *piece)
                if self._is_last:
                    total, over = result
                    sums += torch.stack([total.to(sums), over.to(sums)])
        return sums[0], sums[1]

    def finish_gradients(self) -> None:
        """Add up the gradients of parameters that several stages have."""
        for common in self._common:
            common.add_up()

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        counted = {id(p.grad) for common in self._common if not common.counts_here for p in common.parameters}
        squared = self._local_squared_norm([g for g in gradients if id(g) not in counted])
        if self.ranks.size > 1:
            dist.all_reduce(squared)
        return squared

    def _cut(self, objective: Objective, batch: Any, samples: int) -> Iterator[tuple[Any, int]]:
        """The pieces of a batch. It goes to the device whole, as it was copied ahead: a piece cut on the host
        would lie in memory whose copies what is computed waits for."""
        placed, samples = objective.prepare(batch, samples)
        for rows in batches.split(range(samples), min(self.pieces, samples)):
            piece, count = objective.take(placed, samples, rows)
            # A model may write into its inputs while others of the batch still wait for their backward pass.
            yield (map_tensors(torch.clone, piece) if count < samples else piece), count

    def _numbered(self, objective: Objective, batch: Any, samples: int) -> list[Piece]:
        """The pieces of a micro-batch, with the position that each draws random numbers by."""
        seed = torch.initial_seed()
        cut = enumerate(self._cut(objective, batch, samples))
        pieces: list[Piece] = [(data, count, (seed, number)) for number, (data, count) in cut]
        rng.seed(seed, len(pieces))  # the stages seed differently from here on; what comes next must not
        return pieces

    def _forward(
        self, objective: Objective, piece: Any, samples: int, position: tuple[int, ...]
    ) -> tuple[StageOutputs, Any]:
        """What arrived for a piece, and what this stage makes of it: outputs, sent on, or the loss."""
        arrived = self._neighbours.receive_forward() if self.ranks.rank else StageOutputs()
        # Gradients stay with what arrived, whatever the model does with its tensors in place.
        copies = [tensor.clone() if tensor.requires_grad else tensor for tensor in arrived.tensors]
        given = StageOutputs(copies, arrived.returned)
        if self._is_last:
            try:
                return arrived, self._stage.run(
                    lambda: objective(self.module, piece, samples), position, given
                )
            except JobError as error:
                raise DoesNotFit(f"on a micro-batch of {samples} samples {error}") from error
        result = self._stage.run(lambda: objective.run(self.module, piece), position, given)
        self._neighbours.send_forward(result)
        return arrived, result

    def _backward(self, arrived: StageOutputs, result: Any) -> None:
        if self._is_last:
            result.backward()
        else:
            gradients = self._neighbours.receive_backward(result.tensors)
            pairs = [(t, g) for t, g in zip(result.tensors, gradients, strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        self._neighbours.send_backward(arrived.tensors)


class _Common:
    """Parameters that the same several stages have, of which each computes a part of the gradient.

    :ivar counts_here: whether this is the stage that counts them where all gradients are counted once.
    """

    def __init__(self, parameters: list[nn.Parameter], holders: Sequence[int], ranks: Ranks) -> None:
        # Every rank has to be there when a group is made.
        self._group = dist.new_group(list(holders))
        self.parameters = parameters if ranks.rank in holders else []
        self.counts_here = ranks.rank == holders[0]

    def add_up(self) -> None:
        """Give every stage the sum; a gradient that no stage has stays missing.

        :raises DoesNotFit: when one of them is sparse.
        """
        if not self.parameters:
            return
        gradients = [p.grad for p in self.parameters]
        held = [[float(g is not None), float(g is not None and g.is_sparse)] for g in gradients]
        anywhere = torch.tensor(held)  # from host to host, which no device is waited for
        dist.all_reduce(anywhere, group=self._group)
        for parameter, (number, sparse) in zip(self.parameters, anywhere.tolist(), strict=True):
            if sparse:
                raise DoesNotFit(
                    "several stages share a weight that gets sparse gradients, which can't be added up "
                    f"between them (its shape is {tuple(parameter.shape)}); use sparse=False, or another "
                    "technique"
                )
            if number:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._group)


def _common(holders: dict[nn.Parameter, list[int]], ranks: Ranks) -> list[_Common]:
    by_stages: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter, held_by in holders.items():
        if parameter.requires_grad and len(held_by) > 1:
            by_stages.setdefault(tuple(held_by), []).append(parameter)
    return [_Common(parameters, held_by, ranks) for held_by, parameters in by_stages.items()]
