"""Passes over a job's evaluation data where the model has a ``validation_step`` of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch

from saturn_airflow.launch.users_code import each_of_the_job
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.batch_norm import each_rank_alone
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import timing
from saturn_airflow.training.batches import Data
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.own_step import hooks
from saturn_airflow.training.own_step.user_step import OwnStep


class OwnEvaluation:
    """Evaluates with ``validation_step``, on whole batches; the ranks do everything here together.

    A batch counts by its samples. Each rank takes other batches, unless the model looks at all of them
    together, in ``on_validation_epoch_end`` or by metric objects: then each takes all.
    """

    def __init__(self, job: Job, parallel: Parallel, own: OwnStep, data: Data) -> None:
        self._parallel, self._own, self._data = parallel, own, data
        self._name = f"load_eval_dataloader {job.load_eval_dataloader!r}"
        self._alone = bool(own.metric_objects) or any(
            hooks.is_own(own.model, name) for name in ("on_validation_epoch_start", "on_validation_epoch_end")
        )

    def run(self, limit: int | None = None) -> tuple[float, dict[str, float]]:
        """The mean loss over the evaluation data, NaN where there is none, and what else was logged.

        :param limit: global batches to evaluate, of all ranks together.
        """
        model, own = self._parallel.model, self._own
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        sums: dict[str, torch.Tensor] = {}
        own.log = {}
        with torch.no_grad(), each_rank_alone(model):
            hooks.call(model, "on_validation_epoch_start")
            for number, batch in enumerate(each_of_the_job(self._name, self._batches(limit))):
                self._see(sums, batch, number)
                self._parallel.ranks.stop_requested()  # a sign of life
            means = self._means(sums)
            loss, of_all = own.end_evaluation(means.pop(""))
        for module, trained in modes:
            module.training = trained
        return loss, {**means, **of_all}

    def few(self, samples: int) -> OwnEvaluation:
        """The same evaluation over a batch of so many samples."""
        other = copy.copy(self)
        other._data = self._data.few([samples])
        return other

    def seconds(self) -> float:
        """How long all of the data take, by a few batches."""
        at_once = 1 if self._alone else self._parallel.shares
        return timing.of_evaluation(self.run, self._data.batches_per_epoch, at_once)

    def _batches(self, limit: int | None) -> Iterator[MicroBatch]:
        share, shares = (0, 1) if self._alone else (self._parallel.share, self._parallel.shares)
        return self._data.whole(share, shares, limit)

    def _see(self, sums: dict[str, torch.Tensor], batch: MicroBatch, number: int) -> None:
        shares = 1 if self._alone else self._parallel.shares
        number = number * shares + (0 if self._alone else self._parallel.share)
        taken = self._own.evaluate(batch.data, number, batch.samples or None)
        if not batch.samples:
            return  # it stands in for one that there is not
        for name, value in {"": taken.loss, **taken.logged}.items():
            pair = torch.stack([value.detach().double().cpu(), torch.ones((), dtype=torch.float64)])
            pair *= batch.samples
            sums[name] = sums[name] + pair if name in sums else pair

    def _means(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        own = {name: pair.tolist() for name, pair in sums.items()}
        everyones = [own] if self._alone else self._parallel.ranks.everyones(own)
        names = sorted({name for here in everyones for name in here})
        seen = max(here[""][1] for here in everyones if "" in here) if names else 0.0
        if not seen:
            raise JobError(f"{self._name}: the data is empty")
        means = {}
        for name in names:
            pairs = [here[name] for here in everyones if name in here]
            total, count = (math.fsum(values) for values in zip(*pairs, strict=True))
            means[name] = total / count
        return means
