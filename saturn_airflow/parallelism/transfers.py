"""Copies between the host's memory and a device's that run beside what is computed, and what waits for them.

Whoever uses these says each wait; the tests have transfers that come as late as the waits allow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeVar

import torch

Result = TypeVar("Result", covariant=True)
Tensors = Sequence[torch.Tensor]
#: Work on the host's memory: what is in one lane is done in order, two lanes are done beside each other.
Lane = Literal["in", "out"]


class HostTask(Protocol[Result]):
    """Work on the host that may be under way."""

    def result(self) -> Result:
        """What it returned, once it is done; or what it raised."""
        ...


class Transfers(Protocol):
    """Copies in two streams, to the device and from it; a ticket stands for what was asked of one by then.

    :ivar staged: whether copies go through :meth:`buffer`: others would hold up what is computed.
    """

    staged: bool

    def buffer(self, size: int) -> torch.Tensor:
        """Bytes of the host's memory that copies to and from the device run fast and beside others with."""
        ...

    def to_device(self, sources: Tensors) -> tuple[list[torch.Tensor], Any]:
        """Copies of ``sources``, which must stay as they are until :meth:`wait` for the ticket."""
        ...

    def to_host(self, sources: Tensors, targets: Tensors) -> Any:
        """Copy what is computed of ``sources`` by now; ``targets`` are to be read after :meth:`wait`."""
        ...

    def compute_after(self, ticket: Any, copies: Tensors) -> None:
        """What is computed from here on uses ``copies``, and begins when they have arrived."""
        ...

    def wait(self, ticket: Any) -> None:
        """Wait on the host."""
        ...

    def computed(self) -> Any:
        """A ticket for all that the device was asked to compute by now."""
        ...

    def begin(self, lane: Lane, work: Callable[[], Result]) -> HostTask[Result]:
        """Do ``work`` on the host, beside this thread."""
        ...


class Done:
    """A task that is done."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class AtOnce:
    """The :class:`Transfers` where the device's memory is the host's: all is done when a method returns."""

    staged = False

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def to_device(self, sources: Tensors) -> tuple[list[torch.Tensor], Any]:
        return [source.detach().clone() for source in sources], None

    def to_host(self, sources: Tensors, targets: Tensors) -> Any:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def compute_after(self, ticket: Any, copies: Tensors) -> None:
        pass

    def wait(self, ticket: Any) -> None:
        pass

    def computed(self) -> Any:
        pass

    def begin(self, lane: Lane, work: Callable[[], Result]) -> HostTask[Result]:
        return Done(work())


class OnStreams:
    """The :class:`Transfers` of a GPU: a stream for each direction, pinned buffers, a thread for each
    lane."""

    staged = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Threads begin on the first GPU, which may be another rank's.
        begin = functools.partial(torch.cuda.set_device, device)
        self._lanes = {lane: ThreadPoolExecutor(1, f"saturn-spill-{lane}", begin) for lane in ("in", "out")}

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def to_device(self, sources: Tensors) -> tuple[list[torch.Tensor], Any]:
        # Made in this stream, their memory comes from what this stream has done with.
        with torch.cuda.stream(self._in):
            copies = [torch.empty_like(source, device=self._device) for source in sources]
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
            return copies, self._mark(self._in)

    def to_host(self, sources: Tensors, targets: Tensors) -> Any:
        # What is to be copied has to be computed first. And torch must not hand out the sources' memory anew
        # while this stream reads it, though nobody names them any more (torch.Tensor.record_stream).
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._out)
            return self._mark(self._out)

    def compute_after(self, ticket: Any, copies: Tensors) -> None:
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(ticket)
        # Else their memory would go to the next copy of their own stream while it is computed with.
        for copy in copies:
            copy.record_stream(compute)

    def wait(self, ticket: Any) -> None:
        if ticket is not None:
            ticket.synchronize()

    def computed(self) -> Any:
        return self._mark(torch.cuda.current_stream(self._device))

    def begin(self, lane: Lane, work: Callable[[], Result]) -> HostTask[Result]:
        return self._lanes[lane].submit(work)

    def _mark(self, stream: Any) -> Any:
        # Who waits for it on the host sleeps: others have work for the core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def on(device: torch.device) -> Transfers:
    """The transfers to ``device``."""
    return OnStreams(device) if device.type == "cuda" else AtOnce()


class Buffers:
    """A few buffers in turn: each is used anew when what used it before is done."""

    def __init__(self, transfers: Transfers, count: int = 2) -> None:
        self._transfers = transfers
        self._free: list[tuple[torch.Tensor | None, Callable[[], object]]] = [(None, lambda: None)] * count

    def take(self, size: int) -> torch.Tensor:
        """The buffer that has been in use for longest, once it is free, of at least ``size`` bytes."""
        buffer, wait = self._free.pop(0)
        wait()
        return self._transfers.buffer(size) if buffer is None or len(buffer) < size else buffer

    def give_back(self, buffer: torch.Tensor, wait: Callable[[], object]) -> None:
        """Have ``buffer`` be free once ``wait()`` returns."""
        self._free.append((buffer, wait))


_ALIGNED = 256  # bytes, for copies at full speed


def laid_out(like: Tensors, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes that tensors of these shapes and dtypes take in a buffer."""
    return sum(map(_room, like, dtypes))


def views(buffer: torch.Tensor, like: Tensors, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Tensors of these shapes, orders of memory and dtypes in ``buffer``, one after the other."""
    found, start = [], 0
    for tensor, dtype in zip(like, dtypes, strict=True):
        flat = buffer[start : start + tensor.numel() * dtype.itemsize].view(dtype)
        # Without gaps, with dimensions in the order in memory that they have (``torch.preserve_format``).
        strides = torch.empty_like(tensor, device="meta").stride()
        found.append(flat.as_strided(tensor.shape, strides))
        start += _room(tensor, dtype)
    return found


def _room(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return -(-tensor.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
