"""Ranks: the processes that train one job together, one per device."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from saturn_airflow import library
from saturn_airflow.launch import devices, job_log, launching
from saturn_airflow.launch.emitted import EventChecker
from saturn_airflow.model.errors import DeviceError
from saturn_airflow.training import memory

T = TypeVar("T")

# What torchrun tells of a rank in the environment.
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_BY_DEFAULT = {
    # The ranks of a job are on one machine: nothing needs to listen to the network.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Else NCCL's watchdog ends the process when a kernel of anybody's has failed, before Python can say why.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What one rank knows of itself and the others. The default process group is there, for one rank too.

    :param rank: this rank's number, from 0.
    :param size: how many ranks there are.
    :param device: this rank's device; already the current one where it is a GPU.
    """

    rank: int
    size: int
    device: torch.device
    _emit: Callable[[dict[str, Any]], object] = field(default=lambda event: None, repr=False)
    _stop_requested: Callable[[], bool] = field(default=lambda: False, repr=False)
    _wait_until_recorded: Callable[[], None] = field(default=lambda: None, repr=False)
    _emitted: EventChecker = field(default_factory=EventChecker, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def emit(self, event: str, **fields: Any) -> None:
        """Report what happened, JSON-ready: ``emit("step", step=3, loss=0.5)``. Only rank 0 is heard.

        :raises TypeError: naming what an event lacks (:class:`~saturn_airflow.launch.emitted.EventChecker`).
        """
        if self.is_first:
            self._emit(self._emitted.complete(event, fields))

    def wait_until_recorded(self) -> None:
        """Wait until what was reported so far is written down, and outlives this process and its launcher."""
        self._wait_until_recorded()

    def stop_requested(self) -> bool:
        """Whether *this* rank was asked to stop. Asking shows that it is alive: do it once a batch.

        Ranks hear of a stop at different moments: agree with :meth:`any` before acting on it.
        """
        return self._stop_requested()

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank; every rank must call this together."""
        if self.size == 1:
            return flag
        agreed = torch.tensor([float(flag)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return bool(agreed.item())

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """The sum over all ranks of each of ``numbers``; every rank must call this together.

        They go from host to host, which no device is waited for.
        """
        if self.size == 1:
            return list(numbers)
        added = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(added)
        found: list[float] = added.tolist()
        return found

    def everyones(self, value: T) -> list[T]:
        """``value`` of every rank, in order; every rank must call this together."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)


class LinkOfRank(Protocol):
    """What a rank has of who launched it, as :class:`~saturn_airflow.launch.launching.Link`."""

    told_to_stop: bool

    def emit(self, event: dict[str, Any], /) -> object: ...
    def stop_requested(self) -> bool: ...
    def wait_until_recorded(self) -> None: ...


def _take(device: torch.device) -> None:
    """Make ``device`` this process's, and have it compute: who fails here would have failed with any job.

    :raises DeviceError: when it does not, as where it is gone, or torch has no kernels for it.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # it says what is wrong
        torch.cuda.set_device(device)
        torch.ones((), device=device).item()
        _stay_near(device)
    except (RuntimeError, AssertionError) as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DeviceError(f"GPU {device.index} of those of this run can't be used: {why}") from error


def _stay_near(device: torch.device) -> None:
    """Run on cores next to the GPU: what this process pins then lies in the memory that is copied fastest."""
    near = devices.cores_near(str(torch.cuda.get_device_properties(device).uuid)) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def _tell_numbers(function: Callable[..., Any], technique: str, numbers: Sequence[int]) -> None:
    """Put ``numbers`` into the environment where ``function`` is one that a technique launches.

    Trainers that it calls, such as Accelerate's, train on one rank alone without them. Under Saturn's own
    functions a job's code that reads them would train by the number of devices, and share out its data twice.
    """
    ours = str(function.__module__).partition(".")[0] == __name__.partition(".")[0]
    for name, number in zip(_NUMBERS, numbers, strict=True):
        if technique and not ours:
            os.environ[name] = str(number)
        else:
            os.environ.pop(name, None)


def launch(
    function: Callable[..., Any] | str, *arguments: Any, size: int, threads: int = 1, **settings: Any
) -> list[Any]:
    """Run ``function(*arguments, ranks)`` on ``size`` ranks of this machine and return what each returned.

    :param function: a module-level function, or its ``"module:name"``.
    :param settings: as for :func:`saturn_airflow.launch.launching.launch_ranks`.
    :raises RanksFailedError: for the rank that failed first.
    """
    call = launching.pack(function, *arguments)
    return [result["value"] for result in launching.launch_ranks(call, size, threads=threads, **settings)]


def run(
    link: LinkOfRank,
    rank: int,
    size: int,
    meeting: str,
    device_type: str,
    threads: int,
    technique: str,
    hang_seconds: float,
    launched: float,
    call: bytes,
) -> dict[str, Any]:
    """Be one rank: what a launched process calls."""
    launch_seconds = time.monotonic() - launched
    # As where ranks are forked: by another name libraries take them for the workers of a DataLoader.
    multiprocessing.current_process().name = "MainProcess"
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        memory.grow_segments()
        _take(device)
    # Once it is near its GPU: of the cores that are left to it then.
    torch.set_num_threads(min(threads, len(os.sched_getaffinity(0))))  # more would wait for each other
    for name, value in _BY_DEFAULT.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=size,
        # Whoever watches the ranks notices first, and can say which one hangs.
        timeout=timedelta(seconds=hang_seconds + 60),
    )
    ranks = Ranks(
        rank=rank,
        size=size,
        device=device,
        _emit=link.emit,
        _stop_requested=link.stop_requested,
        _wait_until_recorded=link.wait_until_recorded,
    )
    job_log.redirect(link.emit, first=ranks.is_first)
    # Who is connected first might be done and gone before the others are.
    ranks.barrier()
    if technique:
        library.get(technique)
    function, arguments = launching.unpack(call)
    _tell_numbers(function, technique, (rank, rank, size, size))
    memory.reset_peaks(device)
    value = function(*arguments, ranks)
    result = {
        "value": value,
        "peak_device_bytes": memory.peak_device_bytes(device),
        "peak_host_bytes": memory.peak_host_bytes(),
        "launch_seconds": launch_seconds,
        "told_to_stop": link.told_to_stop,
    }
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
