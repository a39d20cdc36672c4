"""Finding out how the loss of a batch is made up of the losses of its parts.

A few samples are evaluated together, and again in parts. What the means in the loss are taken over is known
(see ``means``); the rule under which the losses of the parts give that of the whole is the job's.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from saturn_airflow.launch.failures import is_of_the_machine
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model.jobs import AS_MICRO_BATCHES, Job
from saturn_airflow.parallelism import forward_writes
from saturn_airflow.parallelism.batch_norm import no_statistics
from saturn_airflow.parallelism.module_state import ModuleState, parameters_of
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import rng
from saturn_airflow.training.batches import Data
from saturn_airflow.training.guarding.randomness import without_randomness
from saturn_airflow.training.layout import MicroBatch
from saturn_airflow.training.losses import means
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.losses.rules import LABELS, SAMPLES, SUM, LossMeans, Rule
from saturn_airflow.training.nested import copied

_SMALL = 1e-3  # what means come to in training, as a share of what they are at first
_LARGE = 100.0  # and at a batch of outliers
_SAMPLES = 4  # that are looked at, where a device computes fewer at once


@dataclass(frozen=True)
class Cuts:
    """How global batches are cut.

    :param by: who cuts them; empty where nobody does.
    :param one_by_one: whether a device computes several parts, one after the other.
    :param parts: that there are of a batch.
    """

    by: str
    one_by_one: bool
    parts: int


def cuts(parallel: Parallel, technique: str, accumulate: int) -> Cuts:
    """How the global batches of a job are cut."""
    by = "" if accumulate == 1 else f"accumulate={accumulate}"
    if parallel.shares > 1 or parallel.pieces > 1:
        by = f"{technique} on {parallel.ranks.size} devices"
    parts = accumulate * parallel.shares * parallel.pieces
    return Cuts(by, accumulate * parallel.pieces > 1, parts)


@dataclass(frozen=True)
class Part:
    """What was seen of the loss of a batch, or of a part of one.

    :param means: the values of the means in it, and
    :param counts: what they were taken over.
    :param over: what the loss is a sum over, where its function told so.
    :param epsilon: the spacing of numbers around 1 in the coarsest format that it was computed in.
    """

    samples: int
    loss: float
    means: Sequence[float] = ()
    counts: Sequence[float] = ()
    over: float | None = None
    epsilon: float = 2.0**-52


def objectives(
    parallel: Parallel,
    objective: Objective,
    data: Data,
    eval_data: Data | None,
    job: Job,
    technique: str,
) -> tuple[Objective, Objective]:
    """A job's objective for its data, and for its evaluation data, by the rule that makes up its loss.

    :raises DoesNotFit: when batches are cut whose parts do not make up the whole.
    """
    by = cuts(parallel, technique, job.hparams.accumulate)
    in_micro_batches = job.in_micro_batches and parallel.shares * parallel.pieces == 1
    if by.by and job.couples_batch and not in_micro_batches:
        raise DoesNotFit(
            f"{by.by} cuts batches into parts, and this job couples their samples (couples_batch=True)"
        )
    rule = in_evaluation = SAMPLES
    if (by.by or eval_data is not None) and not job.couples_batch:
        with of_the_job(f"load_dataloader {job.load_dataloader!r}"):
            some = data.few([sys.maxsize]).first()  # as many as there are in a batch
        try:
            # What is not cut is trained on as it is.
            rule = find_rule(parallel, objective, some, by, looking=training) if by.by else SAMPLES
            if eval_data is not None:
                in_evaluation = find_rule(parallel, objective, some, by)
        except DoesNotFit:
            if not in_micro_batches:
                raise
    if not by.by and in_evaluation.kind == "sum":
        in_evaluation = SAMPLES  # a mean over all parts is that of the one part there is
    return objective.of(data, rule), objective.of(eval_data or data, in_evaluation)


class EvaluateRows(Protocol):
    """Evaluates the loss on some samples of one batch."""

    def __call__(
        self, rows: range, seed: int = 0, over: Sequence[float] | None = None, scale: float = 1.0
    ) -> Part:
        """What is seen of the samples ``rows``.

        :param seed: of what the model draws.
        :param over: what the sums of the means in the loss are divided by, in the place of their counts.
        :param scale: what the means are multiplied by.
        """
        ...


def find_rule(
    parallel: Parallel,
    objective: Objective,
    batch: MicroBatch,
    cuts: Cuts,
    looking: Callable[[Parallel], AbstractContextManager[None]] | None = None,
) -> Rule:
    """The rule that makes up a job's loss; every rank calls this together.

    :param batch: a global batch, whole, the same on all ranks.
    :param looking: puts the model in the mode to look at it in; by default :func:`evaluating`.
    :raises DoesNotFit: when batches are cut, and the parts' losses do not make up the whole's.
    """
    samples = min(batch.samples, max(_SAMPLES, math.ceil(batch.samples / cuts.parts)))
    objective = objective.exactly()
    try:
        data = objective.take(batch.data, batch.samples, range(samples)).data

        def evaluate(
            rows: range, seed: int = 0, over: Sequence[float] | None = None, scale: float = 1.0
        ) -> Part:
            return _evaluate(parallel, objective, objective.take(data, samples, rows), seed, over, scale)

        with (looking or evaluating)(parallel):
            try:
                whole = evaluate(range(samples))
            except Exception as error:
                # The other ranks wait for this one; and nothing was seen of the loss.
                if parallel.wants_example or is_of_the_machine(error):
                    raise
                # The loss may be there in training only; if not, the first step tells.
                if samples == batch.samples or not _works(parallel, objective, batch):
                    return SAMPLES
                raise _fails_on_parts(error) from error
            return rule_of(whole, evaluate, cuts.one_by_one)
    except DoesNotFit as reason:
        if not cuts.by:
            return SAMPLES
        way_out = f"; {AS_MICRO_BATCHES}" if parallel.shares * parallel.pieces == 1 else ""
        raise DoesNotFit(f"{cuts.by} cuts batches into parts, and {reason}{way_out}") from reason.__cause__


def rule_of(whole: Part, evaluate: EvaluateRows, one_by_one: bool) -> Rule:
    """The rule for a loss.

    :param whole: what was seen of a batch.
    :param evaluate: evaluates parts of it.
    :param one_by_one: see :class:`Cuts`.
    :raises DoesNotFit: when there is none.
    """
    if whole.samples < 2 or (math.isnan(whole.loss) and whole.over is None):
        return _by_counts_alone(whole, one_by_one)
    parts = _evaluate_parts(whole.samples, evaluate)
    if whole.over is not None:
        if _is_near(whole, sum(part.loss for part in parts), whole.loss) and _is_near(
            whole, sum(part.over or 0.0 for part in parts), whole.over
        ):
            return SAMPLES
        raise DoesNotFit(
            "the pairs (sum, count) that the loss_function returns for them do not add up to the whole's; "
            "if the second part is a metric, return the loss alone, and name the metric in Job(metrics=...); "
            "if the samples of a batch are coupled, say Job(couples_batch=True)"
        )

    def adds_up() -> bool:
        in_all = zip(*(part.counts for part in parts), strict=False)
        if not all(_is_near(whole, sum(of), all_) for of, all_ in zip(in_all, whole.counts, strict=False)):
            return False
        return _is_sum(
            whole, _evaluate_parts(whole.samples, evaluate, whole.counts) if whole.counts else parts
        )

    if len(whole.counts) == 1 and _is_mean_over_labels(whole, parts):
        _refuse_nonlinear(whole, parts, evaluate)
        return LABELS
    if len(whole.counts) > 1 and not one_by_one and adds_up():
        _refuse_nonlinear(whole, parts, evaluate)
        return Rule("sum", seen=len(whole.counts))
    if _is_even(whole, parts) and _is_mean_over_samples(whole, parts):
        _refuse_nonlinear(whole, parts, evaluate)
        return Rule("samples", len(whole.counts))
    if (not one_by_one or not whole.counts) and adds_up():
        return Rule("sum", seen=len(whole.counts)) if whole.counts else Rule("sum", 0)
    if not _is_near(whole, evaluate(range(whole.samples), 1).loss, whole.loss):
        return _by_counts_alone(
            whole, one_by_one
        )  # it draws numbers, so parts can't be compared with the whole
    if one_by_one and whole.counts and adds_up():
        raise DoesNotFit(_SEVERAL.format(len(whole.counts)))
    raise DoesNotFit(
        f"their losses ({', '.join(f'{part.loss:.6g}' for part in parts)}) do not make up the whole's "
        f"({whole.loss:.6g}): either the samples of a batch are coupled, as by contrastive losses and those "
        "that balance experts, then leave batches whole with Job(couples_batch=True); or it is a mean over "
        "something that Saturn does not see, then give the job a loss_function that returns a pair "
        "(sum, count); or the samples lie along another dimension, then say Job(batch_dim=...)"
    )


_SEVERAL = (
    "the loss holds {} means over different things, by which parts that are computed one after the other "
    "can't be weighed; compute batches in one piece (accumulate=1, another technique than pipeline)"
)


def _by_counts_alone(whole: Part, one_by_one: bool) -> Rule:
    """The rule for a loss of which parts can't be compared with the whole."""
    if len(whole.counts) == 1:
        return LABELS
    if whole.counts and one_by_one:
        raise DoesNotFit(_SEVERAL.format(len(whole.counts)))
    return Rule("sum", seen=len(whole.counts)) if whole.counts else Rule("samples", 0)


def _rows(samples: int) -> list[range]:
    """One sample, another, and the rest."""
    return [range(*both) for both in pairwise(sorted({0, 1, min(2, samples - 1), samples}))]


def _refuse_nonlinear(whole: Part, parts: Sequence[Part], evaluate: EvaluateRows) -> None:
    """Check that the loss is a linear function of the means in it while these shrink, as they do in training,
    or are far larger, as at outliers.

    :raises DoesNotFit: when it is none, as with ``abs``, which may do otherwise with a part's mean.
    """
    for rows, part in zip(_rows(whole.samples), parts, strict=True):
        if not any(part.means) or not math.isfinite(part.loss):
            continue
        scales = (0.5, _LARGE, _SMALL, 1.0)
        half, large, small, again = (evaluate(rows, 0, None, scale).loss for scale in scales)
        if not _is_near(whole, again, part.loss):
            return  # it counts, or draws: what it made of smaller means tells nothing
        slope = (part.loss - small) / (1 - _SMALL)
        off = (
            abs(small + slope * (0.5 - _SMALL) - half),
            abs(small + slope * (_LARGE - _SMALL) - large) / _LARGE,
        )
        # Each is a sum of terms that may cancel out.
        size = abs(part.loss) + abs(small) + max(map(abs, part.means))
        if math.isfinite(sum(off)) and max(off) > max(1e-9, 200 * whole.epsilon) * size:
            raise DoesNotFit(
                "their losses will not make up the whole's: it is no linear function of the means in it, as "
                "with abs, clamp or a power, which may do otherwise with a part's mean; leave batches whole "
                "with Job(couples_batch=True), or apply that to the losses of single samples"
            )
        return


def _evaluate_parts(samples: int, evaluate: EvaluateRows, over: Sequence[float] | None = None) -> list[Part]:
    """What is seen of one sample, of another, and of the rest."""
    try:
        return [evaluate(rows, 0, over) for rows in _rows(samples)]
    except DoesNotFit:
        raise
    except Exception as error:
        raise _fails_on_parts(error) from error


def _fails_on_parts(error: Exception) -> DoesNotFit:
    return DoesNotFit(
        f"the job fails on them ({type(error).__name__}: {error}); if it needs whole batches, say "
        "Job(couples_batch=True), and if samples lie along another dimension, Job(batch_dim=...)"
    )


def _works(parallel: Parallel, objective: Objective, batch: MicroBatch) -> bool:
    """Whether a whole batch can be evaluated."""
    try:
        _evaluate(parallel, objective, batch, 0, None)
    except Exception:
        return False
    return True


def _is_near(whole: Part, one: float, other: float) -> bool:
    return is_near(one, other, whole.epsilon)


def is_near(one: float, other: float, epsilon: float) -> bool:
    """Whether two numbers differ by no more than what was computed in another order can.

    :param epsilon: the spacing of numbers around 1 in the coarsest format that they were computed in.
    """
    # In float32 within 0.0024 %; in bfloat16 200 roundings would let anything pass, so there within 3 %.
    return abs(one - other) <= max(1e-9, min(0.03, 200 * epsilon)) * (abs(one) + abs(other))


def _is_mean_over_labels(whole: Part, parts: Sequence[Part]) -> bool:
    if any(len(part.counts) != 1 for part in parts):
        return False
    counts = [part.counts[0] for part in parts]
    labelled = [part for part in (whole, *parts) if part.counts[0]]
    # What is beside the mean must be the same everywhere, as a penalty on weights is.
    if not any(_spread(_rests(labelled, factor)) <= _noise(whole) for factor in _factors(labelled)):
        return False
    return _is_near(whole, sum(counts), whole.counts[0]) and _is_near(
        whole, _weighted([part.loss for part in parts], counts), whole.loss
    )


def _is_mean_over_samples(whole: Part, parts: Sequence[Part]) -> bool:
    samples = [part.samples for part in parts]
    if not _is_near(whole, _weighted([part.loss for part in parts], samples), whole.loss):
        return False
    if len(whole.counts) != 1:
        return True
    # Beside a mean there may be a little that does not add up: both come from one forward pass, so what is
    # left of the loss without the mean is known far better than the loss.
    rest, *rests = _rests([whole, *parts], 1.0)
    return abs(rest - _weighted(rests, samples)) <= _noise(whole) + 1e-4 * abs(rest)


def _is_sum(whole: Part, parts: Sequence[Part]) -> bool:
    return _is_near(whole, sum(part.loss for part in parts), whole.loss)


def _is_even(whole: Part, parts: Sequence[Part]) -> bool:
    """Whether each mean is over as many things for every sample."""
    return all(
        len(part.counts) == len(whole.counts)
        and all(
            math.isclose(count * whole.samples, of_all * part.samples, rel_tol=1e-6)
            for count, of_all in zip(part.counts, whole.counts, strict=True)
        )
        for part in parts
    )


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / (sum(weights) or 1.0)


def _rests(parts: Sequence[Part], factor: float) -> list[float]:
    """What losses are beside ``factor`` times the one mean in them."""
    return [part.loss - factor * part.means[0] for part in parts]


def _factors(parts: Sequence[Part]) -> list[float]:
    """What a loss may multiply the one mean in it by.

    1; what makes it all of the loss; and, where a constant may stand beside it, the slope of a line through
    the parts, if they are more than three.
    """
    factors = [1.0, *(part.loss / part.means[0] for part in parts[:1] if part.means[0])]
    means, losses = [part.means[0] for part in parts], [part.loss for part in parts]
    if len(parts) > 3 and _spread(means):
        factors.append(statistics.linear_regression(means, losses).slope)
    return factors


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values) if values else 0.0


def _noise(whole: Part) -> float:
    return 16 * whole.epsilon * abs(whole.loss)


@contextmanager
def evaluating(parallel: Parallel) -> Iterator[None]:
    """Without dropout, and with batches in one piece; the model is as before afterwards."""
    modules = [*parallel.model.modules(), *parallel.module.modules()]
    training = [module.training for module in modules]
    trained = [(parameter, parameter.requires_grad) for parameter in parameters_of(parallel.model)]
    pieces, parallel.pieces = parallel.pieces, 1
    try:
        parallel.model.eval()
        parallel.module.eval()
        # BatchNorms without running statistics couple samples, but look at the whole batch.
        with ModuleState(parallel.model.modules()).put_back(), no_statistics(parallel.model):
            yield
    finally:
        means.set_listener(None)
        parallel.finish_evaluating()
        parallel.pieces = pieces
        for module, was in zip(modules, training, strict=True):
            module.training = was
        for parameter, asked in trained:  # which a forward pass may change
            parameter.requires_grad_(asked)


@contextmanager
def training(parallel: Parallel) -> Iterator[None]:
    """As :func:`evaluating`, but in the mode that trains: a router's loss is there alone."""
    eager = torch.compiler.set_stance("force_eager")
    with evaluating(parallel), forward_writes.put_back(parallel.model), eager, without_randomness():
        for module in {*parallel.model.modules(), *parallel.module.modules()}:
            # The statistics that a BatchNorm trains with are of the whole batch, and so of no part.
            module.training = not isinstance(module, _BatchNorm)
        yield


def _evaluate(
    parallel: Parallel,
    objective: Objective,
    data: MicroBatch,
    seed: int,
    over: Sequence[float] | None,
    scale: float = 1.0,
) -> Part:
    rule = Rule("samples", 0) if over is None else SUM
    objective.loss_means = loss_means = LossMeans(
        rule, data.samples, data.samples, parallel.ranks.device, over, scale=scale
    )
    objective.begin(data.samples)
    rng.seed(seed, "probe")
    with torch.no_grad():  # of a copy, which a model may write into
        parallel.evaluate(objective, copied(data.data), data.samples)
    part = _part(loss_means, parallel.model) if loss_means.loss is not None else None
    # Where only some ranks compute losses, they tell the others; and all must come to the same rule.
    return next(each for each in parallel.ranks.everyones(part) if each is not None)


def _part(loss_means: LossMeans, model: nn.Module) -> Part:
    assert loss_means.loss is not None
    numbers = (p.dtype for p in parameters_of(model) if p.is_floating_point() or p.is_complex())
    formats = {loss_means.loss.dtype, *(dtype.to_real() for dtype in numbers)}
    return Part(
        loss_means.samples,
        float(loss_means.loss),
        [float(value) for value in loss_means.values],
        [float(count) for count in loss_means.counts],
        None if loss_means.over_given is None else float(loss_means.over_given),
        max(torch.finfo(dtype).eps for dtype in formats),
    )
