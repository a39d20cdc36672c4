"""Whether an optimizer goes on from what checkpoints keep of it: seen by steps of small parameters."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training import rng
from saturn_airflow.training.guarding.users_state import UsersState
from saturn_airflow.training.optim import optimizers
from saturn_airflow.training.optim.group_state import GroupState
from saturn_airflow.training.optim.in_parts import BY_NUMBER
from saturn_airflow.training.optim.own_state import OwnState
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.state import State

log = logging.getLogger(__name__)

_LONGEST, _OF_EACH_GROUP = 4, 2
# Some do something every few steps alone.
_BEFORE, _AFTER = 3, 8
_WITHIN = 1e-6
_FIX = (
    "Keep what belongs to a parameter in self.state[parameter], and numbers in self.param_groups or as "
    "attributes. If it may be lost, Job(trust=[...]) with the technique's name leaves it unchecked"
)


class _Stepped(nn.Module):
    """Two small parameters of each of ``groups``, with the job's optimizer."""

    def __init__(self, job: Job, model: nn.Module, groups: optimizers.Groups) -> None:
        super().__init__()
        shapes = {name: [min(size, _LONGEST) for size in p.shape] for name, p in model.named_parameters()}
        own: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        chance = rng.generator("small parameters")
        for group in groups:
            here = [f"p{len(own)}_{number}" for number in range(len(group["params"][:_OF_EACH_GROUP]))]
            own.append({**group, "params": here})
            for name, of in zip(here, group["params"], strict=False):
                values = torch.randn(shapes[of], generator=chance, dtype=torch.float64)
                self.register_parameter(name, nn.Parameter(values))
                names[name] = of
        alone = Parallel(self, Ranks(rank=0, size=1, device=torch.device("cpu")))
        self.optimizer = optimizers.make_optimizer(job.hparams, own, alone)
        self.kept = State(alone, self.optimizer, names, GroupState(self.optimizer), OwnState(self.optimizer))

    def take(self, steps: Iterable[int], sparse: bool) -> None:
        for step in steps:
            chance = rng.generator("small gradients", step)
            for parameter in self.parameters():
                gradient = torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
                parameter.grad = gradient.to_sparse(1) if sparse else gradient
            rng.seed("small steps", step)
            self.optimizer.step()

    def go_on_from(self, other: _Stepped) -> None:
        """Have what a checkpoint has of ``other``."""
        with torch.no_grad():
            for own, parameter in zip(self.parameters(), other.parameters(), strict=True):
                own.copy_(parameter)
        given, kept = other.kept.optimizer_tensors(), self.kept
        dtypes = other.kept.dtypes()
        room = kept.make_optimizer_tensors({name: list(t.shape) for name, t in given.items()}, dtypes)
        for name, tensor in room.items():
            tensor.copy_(given[name])
        of_parameters, in_common = other.kept.optimizer_numbers(), other.kept.common_numbers()
        written = json.dumps([of_parameters, in_common, other.kept.groups.values(), other.kept.own.values()])
        numbers, common, of_groups, attributes = json.loads(written)
        kept.set_optimizer(room, numbers, dtypes, common)
        kept.groups.set(of_groups)
        kept.own.set(attributes)


def refuse_what_is_lost(job: Job, model: nn.Module) -> None:
    """Compare steps of the job's optimizer with those of one that goes on from a checkpoint of it.

    One that can't be tried on small parameters is not compared, which the job's log says.

    :raises JobError: when they differ, or a checkpoint can't be made or read.
    """
    if references.load(str(job.hparams.optimizer)) in BY_NUMBER:
        return
    groups = optimizers.parameter_groups(job.hparams, model)
    what = f"optimizer {job.hparams.optimizer!r}"
    for sparse in (False, True):
        try:
            one, other = (_Stepped(job, model, groups) for _ in range(2))
            one.take(range(_BEFORE), sparse)
            break
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
    else:
        log.warning("%s can't be tried on small parameters (%s), so no step of it was resumed", what, why)
        return
    later = range(_BEFORE, _BEFORE + _AFTER)
    try:
        other.go_on_from(one)
        with UsersState(job, model).put_back():
            other.take(later, sparse)
    except JobError:
        raise
    except Exception as error:
        raise JobError(
            f"{what} can't go on from a checkpoint of it, so its job could not be resumed: "
            f"{type(error).__name__}: {error}. {_FIX}"
        ) from error
    one.take(later, sparse)
    for parameter, resumed in zip(one.parameters(), other.parameters(), strict=True):
        if not torch.allclose(
            parameter, resumed, rtol=_WITHIN, atol=_WITHIN * job.hparams.lr, equal_nan=True
        ):
            raise JobError(
                f"{what} makes other steps where it goes on from a checkpoint of it, so a job that is "
                f"resumed would come to something else. {_FIX}"
            )
