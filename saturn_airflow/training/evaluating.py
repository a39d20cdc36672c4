"""Passes over a job's evaluation data.

The loss is computed in the shares that batches are trained in. So are metrics of the job's own where parts
of a batch add up to it; otherwise each rank computes whole batches, one after the other of all there are,
and what sees them sees what it would see on one device.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.users_code import each_of_the_job
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.batch_norm import each_rank_alone
from saturn_airflow.parallelism.module_state import parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import timing
from saturn_airflow.training.batches import Cut, Data, Position
from saturn_airflow.training.job_metrics import Metrics
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.losses.decompose import evaluating, is_near
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.losses.rules import SAMPLES
from saturn_airflow.training.ranks import Ranks

_SAMPLES = 4  # that metrics are tried on


class Evaluation:
    """How a job is evaluated by this rank and the others, which do everything here together.

    :param objective: for ``data``.
    :param cut: how batches are cut to be trained.
    """

    def __init__(
        self, job: Job, parallel: Parallel, objective: Objective, data: Data, ranks: Ranks, cut: Cut
    ) -> None:
        self._parallel, self._objective, self._data, self._ranks = parallel, objective, data, ranks
        # Where micro-batches are not parts that make up a batch, it is evaluated whole, as in a plain loop.
        self._cut = replace(cut, accumulate=1) if job.in_micro_batches else cut
        self._name = f"load_eval_dataloader {job.load_eval_dataloader!r}"
        self._metrics = Metrics(job.metrics, ranks, parallel.share, parallel.shares)
        self._whole = bool(job.metrics) and not self._adds_up()
        if self._whole and objective.rule.kind == "sum":
            # On whole batches it is a mean by samples, and the other ranks have other batches.
            self._objective = objective.of(data, SAMPLES)

    def run(self, limit: int | None = None) -> tuple[float, dict[str, float]]:
        """The mean loss over the evaluation data, and the job's own metrics.

        :param limit: global batches to evaluate.
        """
        parallel, objective = self._parallel, self._objective
        parallel.model.eval()
        parallel.module.eval()
        self._metrics.begin()
        objective.seen = self._metrics.see
        sums = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        given = self._whole_batches(limit) if self._whole else self._shares(limit)
        pieces = parallel.pieces
        try:
            parallel.pieces = 1 if self._whole else pieces
            with torch.no_grad(), each_rank_alone(parallel.model, self._whole):
                for samples, micro_batches in each_of_the_job(self._name, given):
                    objective.begin(samples)
                    for data, count in micro_batches:
                        sums += torch.stack(parallel.evaluate(objective, data, count))
                    objective.end()
                    self._metrics.end_round()
                    self._ranks.stop_requested()  # a sign of life
                parallel.finish_evaluating()
                values = self._metrics.values()
        finally:
            parallel.pieces = pieces
        parallel.model.train()
        parallel.module.train()
        if self._ranks.size > 1:
            dist.all_reduce(sums)
        total_loss, over_all = sums.tolist()
        return float(total_loss / over_all) if over_all else math.nan, values

    def few(self, samples: int) -> Evaluation:
        """The same evaluation over a batch of so many samples, without metrics and reduced precision."""
        other = copy.copy(self)
        other._data, other._objective = self._data.few([samples]), self._objective.exactly()
        other._metrics = Metrics({}, self._ranks, 0, 1)
        return other

    def seconds(self) -> float:
        """How long all of the data take, by a few batches."""
        at_once = self._parallel.shares if self._whole else 1
        return timing.of_evaluation(self.run, self._data.batches_per_epoch, at_once)

    def _shares(self, limit: int | None) -> Iterator[tuple[int, list[MicroBatch]]]:
        data = self._data
        for batch in data.batches(Position(), self._cut, limit or data.batches_per_epoch):
            yield batch.samples, batch.micro_batches
            if batch.ends_epoch:
                return

    def _whole_batches(self, limit: int | None) -> Iterator[tuple[int, list[MicroBatch]]]:
        for batch in self._data.whole(self._parallel.share, self._parallel.shares, limit):
            yield batch.samples, [batch]

    def _adds_up(self) -> bool:
        """Whether all metrics are pairs (sum, count), and those of parts of a batch add up to its own."""
        parallel = self._parallel
        cut = parallel.shares * parallel.pieces * self._cut.accumulate > 1
        if not cut or not self._metrics.all_are_functions:
            return False
        batch = self._data.few([_SAMPLES]).first()
        # The first sample and the last one alone: means over parts of different sizes do not add up to the
        # whole's, where those of halves by chance may.
        edges = sorted({0, 1, min(2, batch.samples - 1), batch.samples})
        tried = [range(batch.samples), *(range(*edge) for edge in pairwise(edges))]
        try:
            with evaluating(parallel):
                found = [self._try_on(batch, rows) for rows in tried]
        except DoesNotFit:
            return False
        whole, *parts = [pairs or {} for pairs in found]
        return None not in found and all(
            is_near(total, math.fsum(part[key][number] for part in parts if key in part), self._epsilon)
            for key, pair in whole.items()
            for number, total in enumerate(pair)
        )

    def _try_on(self, batch: MicroBatch, rows: range) -> dict[str, tuple[float, float]] | None:
        """What metrics come to on some samples; None where one fails on them, or returns no pair."""
        failed = []

        def see(*seen: Any) -> None:
            try:
                self._metrics.see(*seen)
            except Exception as error:
                failed.append(error)

        objective = self._objective.exactly().of(self._data, SAMPLES)
        objective.seen = see
        self._metrics.begin()
        data, count = objective.take(batch.data, batch.samples, rows)
        objective.begin(count)
        with torch.no_grad():
            self._parallel.evaluate(objective, data, count)
        return self._metrics.pairs(failed=bool(failed))

    @property
    def _epsilon(self) -> float:
        """The spacing of numbers around 1 in the coarsest format that the model computes in."""
        formats = {p.dtype for p in parameters_of(self._parallel.model) if p.is_floating_point()}
        return max((torch.finfo(dtype).eps for dtype in formats), default=2.0**-52)
