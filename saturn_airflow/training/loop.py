"""Training one job on this rank, or evaluating its model, by the loop that it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.training import precision
from saturn_airflow.training.job_training import Look, Training, look_nowhere
from saturn_airflow.training.load_data import load_data
from saturn_airflow.training.ranks import Ranks


def train(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Train one job, from its last checkpoint if there is one; every rank calls this together.

    Rank 0 emits these events: ``start`` (step, total_batches, batches_per_epoch, checkpoint), ``step`` (step,
    epoch, loss, seconds, samples_per_second, lr, eta_seconds), ``eval`` (step, epoch, eval_loss, and
    ``metrics`` where the job has its own), ``checkpoint`` (step, path, seconds), ``looked`` (step, seconds,
    checked) and ``warning`` (message). Steps count from 1, epochs from 0; totals are None where the data has
    no length.

    :returns: ``status`` (``"finished"`` or ``"stopped"``), ``steps`` (done in all), ``batches`` (done in this
        call), ``batches_per_epoch`` (0 where the data has no length), ``total_batches``, ``loss`` (of the
        last batch), ``epoch_loss`` (mean over the last epoch), ``eval_loss``, ``metrics`` (the job's own, by
        name), ``seconds`` (of this call), ``setup_seconds`` (until the first batch), ``warmup_seconds`` (what
        the first batches took longer than the others), ``seconds_per_batch`` (mean after the first two) and
        ``spread`` (interquartile range over the median), ``evaluation_seconds`` (of one pass), ``checkpoint``
        (path), ``decided`` (parameters of the technique that were left to it). Measuring, ``batches`` are
        those that were timed.
    :raises DoesNotFit: when the technique can't train this job on these devices.
    :raises ChangesResultError: when it trains otherwise than one device by now.
    :raises NotANumberError: when the loss is NaN or infinite.
    :raises JobError: when the job can't be trained as it is written.
    """
    if request.job.trainer:
        from saturn_airflow.training.trainers import training

        return training.train(request, ranks)
    return make_training(request, ranks).run()


def score(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Evaluate the job's model as it is before its first step; every rank calls this together.

    :returns: ``eval_loss``, and ``metrics``: the job's own by name.
    :raises JobError: when it can't be evaluated, or has no evaluation data.
    """
    training = make_training(replace(request, measure=Measure(), folder=""), ranks)
    assert training.evaluation is not None, "who asks has made sure that there are evaluation data"
    precision.use(request.job.hparams.precision)
    eval_loss, own = training.evaluation.run()
    return {"eval_loss": eval_loss, "metrics": own}


def batches_per_epoch(request: TrainRequest, ranks: Ranks) -> int:
    """Global batches in one pass over the job's data, 0 where it has no length; every rank calls this
    together.

    :raises JobError: when the data can't be used.
    """
    data = load_data(request.job, request.job.load_dataloader, ranks, here=True)
    return data.batches_per_epoch or 0


def make_training(request: TrainRequest, ranks: Ranks, look: Look = look_nowhere) -> Training:
    """The training that a request asks for, ready to run.

    :param look: called with it and the job's model before the technique is.
    """
    if request.job.own_step:
        from saturn_airflow.training.own_step.own_loop import OwnStepTraining

        return OwnStepTraining(request, ranks, look)
    return Training(request, ranks, look)
