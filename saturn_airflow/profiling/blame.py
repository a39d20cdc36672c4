"""Who is to blame when a trial fails: one job, all that run the same code, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from saturn_airflow.model import guards
from saturn_airflow.model.errors import JobError, SaturnError
from saturn_airflow.model.estimates import Estimate
from saturn_airflow.model.jobs import Job


class DoubtfulError(SaturnError):
    """A technique failed once the optimizer had stepped: the job's arguments may be to blame, or it.

    :ivar estimate: what the trial says of the strategy if it is the technique.
    """

    def __init__(self, estimate: Estimate) -> None:
        super().__init__(estimate.reason)
        self.estimate = estimate


#: Measures with a job; the others that share the trial may be found broken (name, reason) in passing.
Measure = Callable[[Job, Sequence[Job], Callable[[str, str], object]], Estimate]


def measured_with_any(jobs: Sequence[Job], measure: Measure) -> tuple[Estimate | None, dict[str, str]]:
    """What is measured with the first of ``jobs`` that is fit for it, and who was found not to be.

    They share a fingerprint, and so what is measured, but not their failures: one whose learning rate makes
    its loss infinite fails alone, and the next is measured in its place.

    :param measure: raises JobError when the job it is called with can't be trained, and DoubtfulError when
        that can't be told: what a second job meets too is the technique's.
    :returns: the estimate (None where no job is left to measure with), and for each broken job the reason.
    """
    broken: dict[str, str] = {}
    verdicts: dict[str, str] = {}
    doubtful: Estimate | None = None
    refused: Estimate | None = None
    for job in jobs:
        if job.name in broken or (refused is not None and guards.mark(job, refused.version) in verdicts):
            continue
        others = [other for other in jobs if other.name != job.name and other.name not in broken]
        try:
            found = measure(job, others, broken.setdefault)
        except JobError as error:
            broken[job.name] = str(error)
            if error.common:
                broken.update((other.name, str(error)) for other in others if run_the_same(job, other))
            continue
        except DoubtfulError as error:
            if doubtful is not None:
                break
            doubtful = error.estimate
            continue
        verdicts.update(found.verdicts)
        found = dataclasses.replace(found, verdicts=dict(verdicts))
        if found.works or not found.verdicts:
            return found, broken
        # The guard refuses it for this job; others it may not.
        refused = found
    return refused or doubtful, broken


def run_the_same(job: Job, other: Job) -> bool:
    """Whether two jobs run the same code on the same data from the same seed until the optimizer steps."""
    return _without_what_follows(job) == _without_what_follows(other)


def _without_what_follows(job: Job) -> Job:
    """``job`` without its name, its optimizer and its schedule, and without where and how long it trains."""
    hparams = dataclasses.replace(
        job.hparams,
        epochs=None,
        batches=1,
        optimizer="torch.optim:SGD",
        lr=0.0,
        optimizer_args={},
        lr_scheduler=None,
        lr_scheduler_args={},
        clip_grad_norm=None,
    )
    trust = ("single",) if job.in_micro_batches else ()
    where: dict[str, Any] = {"techniques": None, "nodes": None, "neutral": (), "trust": trust, "exact": False}
    return dataclasses.replace(job, name="any", hparams=hparams, **where)
