"""Evaluating weights that are there, on a job's evaluation data, as its training evaluates them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.training import loop, precision
from saturn_airflow.training.ranks import Ranks


def score(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Evaluate the job's model as it is before its first step; every rank calls this together.

    :returns: ``eval_loss``, and ``metrics``: the job's own by name.
    :raises JobError: when it can't be evaluated, or has no evaluation data.
    """
    training = loop.make_training(replace(request, measure=Measure(), folder=""), ranks)
    assert training.evaluation is not None, "who asks has made sure that there are evaluation data"
    precision.use(request.job.hparams.precision)
    eval_loss, own = training.evaluation.run()
    return {"eval_loss": eval_loss, "metrics": own}
