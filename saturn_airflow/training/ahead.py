"""The next batch, fetched and copied to the device while that computes on the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from saturn_airflow.launch import job_log
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import precision
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.nested import map_tensors, tensors_in


def pays(job: Job, device: torch.device) -> bool:
    """Whether batches may be fetched ahead for ``job``, and gain by it.

    A CPU computes when it is asked, so there is nothing to fill. And what a job's own functions do after a
    step may be for the next batch, such as to make a curriculum harder.
    """
    return device.type == "cuda" and job.on_step is None


class Ahead:
    """Batches, of which the next can be fetched before it is asked for.

    Nothing that a checkpoint keeps may tell, so that is possible where fetching changes nothing that others
    see. What goes wrong is told when the batch is asked for.

    :param possible: whether it is.
    :param place: is shown the data of a batch's first micro-batch as soon as it is there.
    """

    def __init__(
        self, batches: Iterator[GlobalBatch], possible: bool, place: Callable[[Any], object]
    ) -> None:
        self.possible = possible
        self._batches = batches
        self._place = place
        self._fetched: GlobalBatch | None = None
        self._error: Exception | None = None

    def __next__(self) -> GlobalBatch:
        fetched, error = self._fetched, self._error
        self._fetched, self._error = None, None
        if error is not None:
            raise error
        return next(self._batches) if fetched is None else fetched

    def fetch(self) -> None:
        """Fetch the next batch, while the step on the one before it is computed."""
        step = job_log.current_step()
        job_log.at(step + 1)
        try:
            self._fetched = next(self._batches)
            self._place(self._fetched.micro_batches[0].data)
        except Exception as error:
            self._error = error
        job_log.at(step)


def lies_on_host(data: Any) -> bool:
    """Whether ``data`` may be copied in a stream of its own.

    What is on a GPU already may still be computed in the stream of whoever made it. And torch keeps the
    memory of sparse tensors for no other stream than that which they were made in.
    """
    return all(
        type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        for tensor in tensors_in(data)
    )


class PlacedAhead:
    """A batch on its way to a GPU in a stream of its own, beside what is computed there."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self._device = device
        self._precision = precision
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._given: Any = None
        self._placed: Any = None

    def put(self, data: Any) -> None:
        """Begin to copy ``data``, which the next :meth:`take` may ask for, if :func:`lies_on_host`."""
        if not lies_on_host(data):
            return
        with torch.cuda.stream(self._stream):
            self._given, self._placed = data, precision.place(data, self._device, self._precision)

    def take(self, data: Any) -> Any:
        """``data`` on the device, as what is computed from here on may use it."""
        given, placed = self._given, self._placed
        self._given = self._placed = None
        if given is None or given is not data:
            return precision.place(data, self._device, self._precision)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)

        def used(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(compute)
            return tensor

        return map_tensors(used, placed)
