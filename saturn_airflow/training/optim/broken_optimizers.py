"""Which jobs that share a trial can't have their optimizer or schedule, found without training them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import batches
from saturn_airflow.training.batches import Data
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.optimizers import Groups, make_optimizer, make_scheduler, parameter_groups
from saturn_airflow.training.ranks import Ranks

# Steps of a schedule that are tried, and where nobody knows whether there are as many.
_STEPS, _UNSURE = 1000, 3


class _Tiny(Parallel):
    """The parameters of ``real``, each with one element: what an optimizer may do to them costs nothing."""

    def __init__(self, real: Parallel) -> None:
        super().__init__(real.model, real.ranks, optimizer_kernels=real.optimizer_kernels)
        self._tiny = {
            name: nn.Parameter(torch.zeros((1,) * p.ndim, dtype=p.dtype, device=p.device))
            for name, p in real.trainable().items()
        }

    def trainable(self) -> dict[str, nn.Parameter]:
        return self._tiny


def broken_optimizers(
    job: Job, alike: Iterable[Job], groups: Groups, parallel: Parallel, data: Data
) -> dict[str, str]:
    """Why each of ``alike`` can't have its optimizer or its schedule, by the job's name.

    :param job: the job that is trained; its own are known to be fine.
    :param groups: the parameter groups of the whole model.
    :param data: of all of them.
    :param parallel: the model as the technique trains it; it is left as it is.
    """
    alike = list(alike)
    if not alike:
        return {}  # to make a schedule may change what it looks at
    tiny = _Tiny(parallel)
    if _why_not(job.hparams, groups, tiny, data) is not None:
        return {}  # this optimizer looks at its parameters: tiny ones tell nothing
    same_groups = [o for o in alike if o.hparams.parameter_groups == job.hparams.parameter_groups]
    reasons = {other.name: _why_not(other.hparams, groups, tiny, data) for other in same_groups}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def refuse_broken_schedule(job: Job, model: nn.Module, data: Data) -> None:
    """Go through the first steps of the job's schedule, which a trial takes few of.

    :param model: the job's, whole; it is left as it is.
    :raises JobError: when it can't be had, or fails.
    """
    if job.hparams.lr_scheduler is None:
        return
    alone = Parallel(model, Ranks(rank=0, size=1, device=torch.device("cpu")))
    try:
        optimizer = make_optimizer(job.hparams, parameter_groups(job.hparams, model), _Tiny(alone))
    except SaturnError:
        return  # it looks at its parameters: tiny ones tell nothing
    total = batches.total_steps(job.hparams, data)
    steps = min(total or _UNSURE, _STEPS)
    make_scheduler(job.hparams, optimizer, steps, GroupState(optimizer), total)


def _why_not(hparams: HParams, groups: Groups, parallel: Parallel, data: Data) -> str | None:
    try:
        optimizer = make_optimizer(hparams, groups, parallel)
        make_scheduler(hparams, optimizer, 0, GroupState(optimizer), batches.total_steps(hparams, data))
    except SaturnError as error:
        return str(error)
    return None
