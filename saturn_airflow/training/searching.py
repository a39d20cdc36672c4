"""Searching for the parameters of a technique."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from saturn_airflow.launch import devices
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.library import Parameters
from saturn_airflow.model.estimates import OUT_OF_MEMORY
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.status import Status
from saturn_airflow.training.session import Session


def first_that_fits(session: Session, *tiers: Sequence[Parameters]) -> tuple[Parameters, float]:
    """The fastest parameters of the first tier of which any fit in memory, and their seconds per batch.

    A tier needs less memory than the one before it and is slower, so it is only measured where that one does
    not fit.

    :raises DoesNotFit: when none of them fits.
    """
    *easier, last = tiers
    for tier in easier:
        try:
            return session.fastest(tier)
        except DoesNotFit:
            continue
        except RanksFailedError as error:
            if error.failure.status not in (Status.OUT_OF_MEMORY, Status.LOST):
                raise
    return session.fastest(last)


def refuse_hopeless(technique: str, most_frugal: Parameters, job: Job, count: int, session: Session) -> None:
    """Refuse what can't fit in the GPUs' memory, before it is tried; on CPU slots nothing is refused.

    :param most_frugal: the parameters with which the technique takes least.
    :raises DoesNotFit: when the tensors alone would take more than a device has.
    """
    device_bytes = devices.smallest_gpu_bytes()
    if device_bytes is None or job.own_step:
        return
    # Their values take no memory.
    request = TrainRequest(job=replace(job, init_from=None), technique=technique, parameters=most_frugal)
    try:
        peak, *_ = session.launch("saturn_airflow.training.memory_prediction:predict", request)
    except RanksFailedError:
        return  # whatever went wrong, the trial itself will tell
    if peak is not None and peak > device_bytes:
        raise DoesNotFit(
            f"{OUT_OF_MEMORY} (predicted): its tensors alone take {peak / 2**30:.1f} GiB on each of "
            f"{count} devices, which have {device_bytes / 2**30:.1f} GiB"
        )


# What is measured in a trial is not all that training takes: fragments, batches that are longer than others.
_LEFT_FREE = 0.12


def how_many_stay(job: Job, parameters: Parameters, session: Session) -> int:
    """How many of a model's blocks, with gradients and optimizer, the memory has room for that is left free
    of a GPU under ``parameters``; 0 on CPU slots.

    :param parameters: spill's, which the session has measured.
    """
    device_bytes = devices.smallest_gpu_bytes()
    if device_bytes is None:
        return 0
    request = TrainRequest(job=replace(job, init_from=None), technique="spill")
    try:
        (blocks, each), *_ = session.launch("saturn_airflow.training.memory_prediction:blocks", request)
    except RanksFailedError:
        return 0
    left: float = (1 - _LEFT_FREE) * device_bytes - session.measured(parameters)["peak_device_bytes"]
    return max(0, min(int(blocks) - 1, int(left // each)))
