"""What the ranks of a trial run: the guard, and then what was asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.parallelism import recomputation
from saturn_airflow.training import loading_weights, loop, memory, precision
from saturn_airflow.training.batches import GlobalBatch
from saturn_airflow.training.guarding.guard import Guard
from saturn_airflow.training.job_training import Training
from saturn_airflow.training.loading import load_model
from saturn_airflow.training.ranks import Ranks

# The optimizer that trains takes its first step in a warm-up.
_LEAST_WARMUPS = 2


def check(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Only guard the technique; every rank calls this together.

    :returns: ``guard``, the verdict of :meth:`~saturn_airflow.training.guarding.guard.Guard.compare`,
        ``guard_seconds``, without what training would have taken for its first steps as well, and
        ``plain_steps``, which other calls that take the same may be given.
    :raises ChangesResultError: when the technique does not train as one device does.
    :raises DoesNotFit: when it can't train this job on these devices.
    :raises JobError: when the job can't be trained as it is written.
    """
    if request.job.trainer:
        from saturn_airflow.training.trainers import resumed

        return resumed.check(request, ranks)
    _, guard, verdict = _passed(replace(request, measure=Measure()), ranks)
    return {
        "guard": verdict,
        "guard_seconds": guard.seconds - guard.warmup_seconds,
        "plain_steps": guard.kept,
    }


def measure(request: TrainRequest, ranks: Ranks) -> dict[str, Any]:
    """Guard the technique, and measure it then as :func:`~saturn_airflow.training.loop.train` does.

    :returns: what both tell; ``guard_seconds`` without what measuring would have taken as well.
    :raises ChangesResultError: as :func:`check` does.
    """
    if request.job.trainer:
        from saturn_airflow.training.trainers import resumed

        return resumed.measure(request, ranks)
    training, guard, verdict = _passed(request, ranks)
    recomputation.compare_anew()
    stood_in = _stand_in_for_a_warmup(training, guard)
    memory.reset_peaks(ranks.device)
    result = training.run()
    # What the guard took is not what training will take; that its first steps were slow, training will meet.
    result["setup_seconds"] = max(0.0, result["setup_seconds"] - guard.seconds)
    result["seconds"] -= guard.seconds
    slower = max(0.0, stood_in - result["seconds_per_batch"]) if stood_in else 0.0
    result["warmup_seconds"] += guard.warmup_seconds + slower
    return {
        **result,
        "guard": verdict,
        "guard_seconds": guard.seconds - guard.warmup_seconds - stood_in,
        "plain_steps": guard.kept,
    }


def _stand_in_for_a_warmup(training: Training, guard: Guard) -> float:
    """Let the guard's step on a whole batch be one of those that warm up, where it is computed as they are;
    how many seconds it took."""
    how, hparams = training.request.measure, training.hparams
    alike = hparams.precision == guard.job.hparams.precision and not hparams.compile
    if how is None or how.warmups < _LEAST_WARMUPS or guard.whole_seconds is None or not alike:
        return 0.0
    training.request = replace(training.request, measure=how._replace(warmups=how.warmups - 1))
    return guard.whole_seconds


def _passed(request: TrainRequest, ranks: Ranks) -> tuple[Training, Guard, str]:
    """A training whose technique was compared, the guard, and its verdict."""
    guards: list[Guard] = []

    def look(training: Training, model: nn.Module) -> None:
        job, data = training.job, training.data

        def load() -> nn.Module:
            another = load_model(job)
            loading_weights.start_from(another, job, request.initial_weights)
            precision.use("float32")  # whatever the job's code has set
            return another

        kept = request.plain_steps
        guards.append(Guard(job, request.technique, model, load, ranks, data, training.eval_data, kept))

    precision.use("float32")
    try:
        training = loop.make_training(request, ranks, look)
    except Exception:
        if not guards:
            raise
        with guards[0].blaming():
            raise
    precision.use("float32")
    (guard,) = guards
    return training, guard, _compare(training, guard)


def _compare(training: Training, guard: Guard) -> str:
    """Take the guard's steps; of ``training`` only the weights are others after them."""
    with training.compared(guard.job) as own:

        def step(batch: GlobalBatch, clip: float | None) -> tuple[float, float | None]:
            own.hparams = guard.job.hparams
            if clip is not None:
                own.hparams = replace(own.hparams, clip_grad_norm=clip)
            own._train_step(batch, False)
            assert own.metrics["loss"] is not None
            return own.metrics["loss"], own.counted

        def evaluate(samples: int) -> float:
            return own.evaluation.few(samples).run(1)[0] if own.evaluation is not None else math.nan

        return guard.compare(training.parallel, own.optimizers, training.cut, step, evaluate)
