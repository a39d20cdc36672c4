"""Running a model's stages, one per rank: the schedule, and what travels between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from saturn_airflow.training import batches, stages
from saturn_airflow.training.objective import Objective
from saturn_airflow.training.parallel import Parallel
from saturn_airflow.training.ranks import Ranks


class Pipelined(Parallel):
    """One stage of a model per rank.

    Hidden states and their gradients travel in the format that the weights have. Each direction has a process
    group of its own: in one group, sends in both directions could wait for each other.

    :param micro_batches: pieces that every micro-batch of the loop is cut into.
    :param schedule: ``"1f1b"`` or ``"gpipe"``.
    """

    wants_example = True

    def __init__(self, model: nn.Module, ranks: Ranks, micro_batches: int, schedule: str) -> None:
        super().__init__(model, ranks)
        assert schedule in ("1f1b", "gpipe"), schedule
        self._pieces = micro_batches
        self._schedule = schedule
        self._is_last = ranks.rank == ranks.size - 1
        self._dtype = next(p.dtype for p in model.parameters())
        everyone = list(range(ranks.size))
        self._forward_group, self._backward_group = (dist.new_group(everyone) for _ in range(2))
        self._ends_group = dist.new_group(sorted({0, ranks.size - 1}))
        self._entered: torch.Tensor | None = None
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._tied: list[nn.Parameter] = []

    def prepare(self, objective: Objective, batch: Any, samples: int) -> None:
        """Cut the model: find out what it consists of, measure that on the first rank, share the cuts."""
        piece, count = next(self._cut(batch, samples))
        on_cpu = objective.on(torch.device("cpu"))
        example, over = on_cpu.prepare(piece, count)
        anatomy = stages.find_anatomy(
            self.model, lambda: on_cpu(self.model, example, over)[0], self.ranks.size
        )
        cuts: list[Any] = [None]
        if self.ranks.is_first:
            example, over = objective.prepare(piece, count)
            device = self.ranks.device
            seconds = stages.measure(
                self.model, anatomy, lambda: objective(self.model, example, over)[0], device
            )
            cuts = [stages.balance(*seconds, self.ranks.size)]
        if self.ranks.size > 1:
            dist.broadcast_object_list(cuts)
            if self.ranks.rank in (0, self.ranks.size - 1):
                self._tied = [p for p in self.model.parameters() if p in anatomy.before & anatomy.after]
        stages.cut(self.model, anatomy, cuts[0][self.ranks.rank], self.ranks.device, self._receive)

    def backward(
        self, objective: Objective, batch: Any, samples: int, scale: float, last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        news = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        pieces = list(self._cut(batch, samples))
        running: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()

        def forward(piece: tuple[Any, int]) -> None:
            result, over = self._forward(objective, *piece)
            if self._is_last:
                news.add_(torch.stack([result.detach().to(news), over.to(news)]))
                result = result * scale
            running.append((self._entered, result))

        def backward() -> None:
            entered, result = running.popleft()
            self._backward(entered, result)

        ahead = len(pieces)
        if self._schedule == "1f1b":
            ahead = min(ahead, self.ranks.size - self.ranks.rank)
        for number, piece in enumerate(pieces):
            if number >= ahead:
                backward()
            forward(piece)
        while running:
            backward()
        self._finish_sending()
        return news[0], news[1]

    def evaluate(self, objective: Objective, batch: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        news = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        for piece in self._cut(batch, samples):
            result, over = self._forward(objective, *piece)
            if self._is_last:
                news += torch.stack([result.to(news), over.to(news)])
        self._finish_sending()
        return news[0], news[1]

    def finish_gradients(self) -> None:
        """Add up the gradients of weights that are tied between the first and the last stage."""
        for parameter in self._tied:
            if parameter.requires_grad:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=self._ends_group)

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        tied = [p.grad for p in self._tied] if self._is_last else []
        own = [g for g in gradients if not any(g is other for other in tied)]
        squared = self._local_squared_norm(own)
        if self.ranks.size > 1:
            dist.all_reduce(squared)
        return squared

    def _cut(self, batch: Any, samples: int) -> Iterator[tuple[Any, int]]:
        for rows in batches.split(range(samples), min(self._pieces, samples)):
            yield batches.take(batch, samples, rows)

    def _forward(self, objective: Objective, piece: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What this stage makes of a piece: hidden states, sent on, or the loss and what it is a sum over."""
        prepared, count = objective.prepare(piece, samples)
        self._entered = None
        if self._is_last:
            return objective(self.module, prepared, count)
        try:
            objective.run(self.module, prepared)
        except stages.LeaveForward as left:
            hidden = left.hidden.to(self._dtype)
        self._send(hidden.detach().contiguous(), self.ranks.rank + 1, self._forward_group)
        return hidden, hidden

    def _backward(self, entered: torch.Tensor | None, result: torch.Tensor) -> None:
        if self._is_last:
            result.backward()  # type: ignore[no-untyped-call]
        else:
            gradient = torch.empty_like(result)
            dist.recv(gradient, self.ranks.rank + 1, group=self._backward_group)
            if result.requires_grad:  # it does not where all of this stage and those before it is frozen
                result.backward(gradient)  # type: ignore[no-untyped-call]
        if entered is not None:
            assert entered.grad is not None
            self._send(entered.grad, self.ranks.rank - 1, self._backward_group)

    def _receive(self, like: torch.Tensor) -> torch.Tensor:
        hidden = torch.empty(like.shape, dtype=self._dtype, device=self.ranks.device)
        dist.recv(hidden, self.ranks.rank - 1, group=self._forward_group)
        self._entered = hidden.requires_grad_(torch.is_grad_enabled())
        return hidden

    def _send(self, tensor: torch.Tensor, to: int, group: Any) -> None:
        self._sent.append((dist.isend(tensor, to, group=group), tensor))

    def _finish_sending(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
