"""Whether training changes what a job's data give, as where a sampler follows the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.training.batches import Cut, Data, GlobalBatch, Position
from saturn_airflow.training.loaders import alike
from saturn_airflow.training.nested import map_tensors


class FollowedData:
    """Batches by their numbers, and what their data's objects keep, before the first step on them.

    :param sizes: the samples of each of the batches, which were fetched by :meth:`Data.few`.
    """

    def __init__(
        self, job: Job, data: Data, sizes: Sequence[int], cut: Cut, batches: Mapping[int, GlobalBatch]
    ) -> None:
        self._job, self._data, self._sizes, self._cut = job, data, sizes, cut
        self._numbers = set(batches)
        self._changed = data.watched()
        self._given = map_tensors(torch.clone, _parts(batches))

    def refuse_what_training_changes(self) -> None:
        """Fetch the batches anew where steps have changed what the data look at.

        :raises JobError: when they are others now: a resumed job goes through its data without training.
        """
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

    def _forget(self) -> None:
        """Have a stream, which keeps its first batches, fetch them anew."""
        self._data.batches(Position(), Cut(), 0)


def _parts(batches: Mapping[int, GlobalBatch]) -> list[Any]:
    return [part.data for batch in batches.values() for part in batch.micro_batches]
