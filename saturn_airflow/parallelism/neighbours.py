"""What travels between the stages of a pipeline: tensors of any number, shape, type and order of memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from saturn_airflow.parallelism.stages import StageOutputs
from saturn_airflow.training.ranks import Ranks


@dataclass(frozen=True)
class _Label:
    """What a tensor on its way looks like.

    :param order: its dimensions, those that lie furthest apart in memory first.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    has_gradient: bool


class Neighbours:
    """The ranks with the stage before this one and the stage after it.

    Each direction has a process group of its own: in one group, sends in both directions could wait for each
    other. What tensors look like is told when it changes.
    """

    def __init__(self, ranks: Ranks) -> None:
        everyone = list(range(ranks.size))
        self._ranks = ranks
        self._forward_group, self._backward_group = (dist.new_group(everyone) for _ in range(2))
        self._under_way: list[tuple[Any, torch.Tensor]] = []
        self._sent_labels: bytes = b""
        self._received_labels: tuple[list[_Label], list[Any]] = ([], [])

    def send_forward(self, stage_outputs: StageOutputs) -> None:
        """Send them to the stage after this one."""
        labels = [_label(tensor) for tensor in stage_outputs.tensors]
        encoded = pickle.dumps((labels, stage_outputs.returned))
        message = encoded if encoded != self._sent_labels else b""
        self._sent_labels = encoded
        to, group = self._ranks.rank + 1, self._forward_group
        self._send(torch.tensor([len(message)]), to, group)
        if message:
            self._send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to, group)
        for tensor, label in zip(stage_outputs.tensors, labels, strict=True):
            self._send(tensor.detach().permute(label.order), to, group)

    def receive_forward(self) -> StageOutputs:
        """What the stage before this one sends; those of its tensors that have a gradient there get one."""
        before, group = self._ranks.rank - 1, self._forward_group
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, before, group=group)
        if size.item():
            message = torch.empty(int(size.item()), dtype=torch.uint8)
            dist.recv(message, before, group=group)
            self._received_labels = pickle.loads(message.numpy().tobytes())
        labels, returned = self._received_labels
        tensors = []
        for label in labels:
            permuted = self._receive([label.shape[d] for d in label.order], label.dtype, before, group)
            back = [label.order.index(d) for d in range(len(label.shape))]
            wanted = label.has_gradient and torch.is_grad_enabled()
            tensors.append(permuted.permute(back).requires_grad_(wanted))
        return StageOutputs(tensors, list(returned))

    def send_backward(self, inputs: Sequence[torch.Tensor]) -> None:
        """Send the gradients of what :meth:`receive_forward` returned, as far as they were wanted."""
        gradients = [tensor.grad for tensor in inputs if tensor.requires_grad]
        if gradients:
            to, group = self._ranks.rank - 1, self._backward_group
            self._send(torch.tensor([gradient is not None for gradient in gradients]), to, group)
            for gradient in gradients:
                if gradient is not None:
                    self._send(gradient, to, group)

    def receive_backward(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of ``outputs``, what was sent on; None where there are none."""
        after, group = self._ranks.rank + 1, self._backward_group
        wanted = [tensor.requires_grad for tensor in outputs]
        if not any(wanted):
            return [None] * len(outputs)
        are_there = torch.empty(sum(wanted), dtype=torch.bool)
        dist.recv(are_there, after, group=group)
        answers = iter(are_there.tolist())
        return [
            self._receive(tensor.shape, tensor.dtype, after, group)
            if tensor.requires_grad and next(answers)
            else None
            for tensor in outputs
        ]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Afterwards, everything that was sent has arrived."""
        yield
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send(self, tensor: torch.Tensor, to: int, group: Any) -> None:
        flat = _bytes(tensor.contiguous())
        if flat.numel():
            self._under_way.append((dist.isend(flat, to, group=group), flat))

    def _receive(self, shape: Sequence[int], dtype: torch.dtype, sender: int, group: Any) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._ranks.device)
        flat = _bytes(tensor)
        if flat.numel():
            dist.recv(flat, sender, group=group)
        return tensor


def _label(tensor: torch.Tensor) -> _Label:
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return _Label(tuple(tensor.shape), tensor.dtype, tuple(order), tensor.requires_grad)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, whatever its type is."""
    return tensor.view(-1).view(torch.uint8)
