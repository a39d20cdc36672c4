"""Whether training changes what a job's data give, as where a sampler follows the losses."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import given_order
from saturn_airflow.training.batches import Cut, Data, GlobalBatch, Position
from saturn_airflow.training.loaders import alike
from saturn_airflow.training.nested import copied, tensors_in


class FollowedData:
    """Batches by their numbers, and what their data's objects keep, before the first step on them.

    :param sizes: the samples of each of the batches, which were fetched by :meth:`Data.few`.
    """

    def __init__(
        self, job: Job, data: Data, sizes: Sequence[int], cut: Cut, batches: Mapping[int, GlobalBatch]
    ) -> None:
        self._job, self._data, self._sizes, self._cut = job, data, sizes, cut
        self._batches = batches
        self._numbers = set(batches)
        self._changed = data.watched()
        self._given = copied(_parts(batches))

    def refuse_what_training_changes(self, drawn_by: Collection[torch.Generator] = ()) -> None:
        """Fetch the batches anew where steps have changed what the data look at, or have written into them.

        :param drawn_by: generators by which the steps draw.
        :raises JobError: when they are others now: a resumed job goes through its data without training.
        """
        given_order.refuse_drawn_by(self._data, drawn_by)
        self._refuse_what_is_written()
        if not self._changed():
            return
        self._forget()
        with of_the_job(f"load_dataloader {self._job.load_dataloader!r}"):
            few = self._data.few(self._sizes).batches(Position(), self._cut, len(self._sizes))
            again = {number: batch for number, batch in enumerate(few) if number in self._numbers}
        self._forget()  # the next who looks is to see none that these steps have changed
        if alike(self._given, _parts(again)):
            return
        raise JobError(
            f"training changes what load_dataloader {self._job.load_dataloader!r} gives: its batches are "
            "others after some steps, as where a sampler follows the losses. A job that is resumed goes "
            "through its data without training, and would get others. Let the data follow the epoch "
            "(set_epoch) or what they count themselves; or Job(trust=[...]) with the technique's name leaves "
            "it unchecked"
        )

    def _refuse_what_is_written(self) -> None:
        """:raises JobError: when steps have written into a batch of which later epochs get the memory."""
        if alike(self._given, _parts(self._batches)) or not self._gives_the_same_memory():
            return
        raise JobError(
            f"training writes into the batches of load_dataloader {self._job.load_dataloader!r}, which gives "
            "the same tensors in each epoch: later ones would get what earlier ones have made of them, and a "
            "job that is resumed what there was at first. Copy in the model or the loss before writing "
            "(x = x.clone(), or x * y in the place of x.mul_(y)), or return copies from the data; or "
            "Job(trust=[...]) with the technique's name leaves it unchecked"
        )

    def _gives_the_same_memory(self) -> bool:
        """Whether who goes through the data twice finds in the first batch what was written into it."""

        def first() -> Any:
            return next(iter(self._data.batches(Position(), Cut(), 1))).micro_batches[0].data

        with self._data.aside(), of_the_job(f"load_dataloader {self._job.load_dataloader!r}"):
            one = first()
            before = copied(one)
            again = first()
            if not _memory(one) & _memory(again):
                return False
            _write_into(one)
            # Some fill the same tensors anew for each batch.
            found = not alike(before, first())
            _write_into(one, before)
        return found

    def _forget(self) -> None:
        """Have a stream, which keeps its first batches, fetch them anew."""
        self._data.batches(Position(), Cut(), 0)


def _memory(data: Any) -> set[int]:
    """Where the tensors of a batch are that hold something."""
    tensors = [tensor for tensor in tensors_in(data) if tensor.layout == torch.strided and tensor.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@torch.no_grad()
def _write_into(data: Any, values: Any = None) -> None:
    """Have the tensors of a batch hold ``values``, or if there are none something else than they do."""
    new = itertools.repeat(None) if values is None else tensors_in(values)
    for tensor, value in zip(tensors_in(data), new, strict=False):
        with contextlib.suppress(RuntimeError):  # of which several elements are one
            tensor.copy_(tensor == 0 if value is None else value)


def _parts(batches: Mapping[int, GlobalBatch]) -> list[Any]:
    return [part.data for batch in batches.values() for part in batch.micro_batches]
