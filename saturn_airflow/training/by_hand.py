"""Training in this very process, so that a debugger stops in it: nothing is watched, and nobody waits."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from saturn_airflow.launch import handed_over, launching
from saturn_airflow.launch.request import TrainRequest
from saturn_airflow.training import ranks

Event = dict[str, Any]
# How many ranks, where they meet, the type of their devices, threads of each, what they train.
_Settings = tuple[int, str, str, int, TrainRequest]

# Whoever thinks at a breakpoint keeps the other ranks waiting.
_PATIENCE_SECONDS = 7 * 86400.0
# The others have done what rank 0 has when it ends.
_LEAVE_SECONDS = 30.0


class _LocalLink:
    """What a rank of a launched process finds in the place of its launcher."""

    told_to_stop = False

    def __init__(self, on_event: Callable[[Event], object]) -> None:
        self.emit = on_event

    def stop_requested(self) -> bool:
        return False

    def wait_until_recorded(self) -> None:
        pass


def train(
    request: TrainRequest, size: int, device_type: str, threads: int, on_event: Callable[[Event], object]
) -> dict[str, Any]:
    """Train as :func:`saturn_airflow.training.loop.train` does, rank 0 in this process.

    Further ranks are processes of their own, in which breakpoints don't stop.

    :param device_type: ``"cpu"``, or ``"cuda"``: rank i takes visible GPU i.
    :param threads: CPU threads of each rank.
    :param on_event: called with the events that rank 0 emits.
    :raises DoesNotFit, JobError: as training does, with what the job's own code raised as their cause.
    """
    folder = tempfile.mkdtemp(prefix="saturn-by-hand-")
    settings: _Settings = (size, f"file://{folder}/meeting", device_type, threads, request)
    context = multiprocessing.get_context("spawn")
    handed = handed_over.kept()
    others = [
        context.Process(target=_run_other_rank, args=(rank, settings, handed)) for rank in range(1, size)
    ]
    try:
        for other in others:
            other.start()
        result = _run_rank(0, settings, on_event)
        for other in others:
            other.join(_LEAVE_SECONDS)
        return result
    finally:
        for other in others:
            if other.is_alive():
                other.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)


def _run_rank(rank: int, settings: _Settings, on_event: Callable[[Event], object]) -> dict[str, Any]:
    size, meeting, device_type, threads, request = settings
    call = launching.pack("saturn_airflow.training.loop:train", request)
    link = _LocalLink(on_event)
    place = (rank, size, meeting, device_type, threads, request.technique)
    value: dict[str, Any] = ranks.run(link, *place, _PATIENCE_SECONDS, time.monotonic(), call)["value"]
    return value


def _run_other_rank(rank: int, settings: _Settings, handed: handed_over.HandedOver) -> None:
    launching.forget_start_method()
    handed_over.receive(handed)
    # Two debuggers can't share a terminal.
    os.environ["PYTHONBREAKPOINT"] = "0"
    sys.stdin = open(os.devnull)  # noqa: SIM115 - until the process ends
    _run_rank(rank, settings, lambda event: None)
