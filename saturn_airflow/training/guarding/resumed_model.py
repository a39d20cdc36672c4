"""Whether a model goes on from what checkpoints keep of it: what it remembers besides shows in its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism.module_state import ModuleState, parameters_of
from saturn_airflow.training import job_globals, model_attributes
from saturn_airflow.training.guarding import whole
from saturn_airflow.training.guarding.users_state import UsersState

_BY_CHANCE = (
    "the loss of one batch is {:.6g} and then {:.6g}, with the same weights and the same state of torch's, "
    "numpy's and Python's global generators: it follows from something that can't be repeated, such as "
    "the time, os.urandom(), secrets or a generator made without a seed (numpy.random.default_rng()). Each "
    "device would see another, and so would a job that is resumed. Draw from a global generator, which "
    "Saturn seeds for each step. If it may differ, Job(trust=[...]) with the technique's name leaves it "
    "unchecked"
)

Loss = Callable[[nn.Module, Any], float]


def refuse_what_is_lost(
    job: Job,
    trained: nn.Module,
    another: nn.Module,
    attributes: Mapping[str, Mapping[str, Any]],
    in_functions: Mapping[str, Any],
    loss: Loss,
    batch: Any,
    allowed: float,
) -> None:
    """Compare the loss of ``trained`` with that of a model that gets what a checkpoint keeps of it.

    Where forward passes change parameters, which both share, nothing is compared. Both begin with the same
    generators' state, so where one model's own loss is another each time, it follows from something else.

    :param another: the job's model as it is loaded, which this changes.
    :param attributes: those that a checkpoint keeps, and what it keeps
    :param in_functions: of functions that are attributes.
    :param loss: of a model and a batch.
    :param allowed: how far the losses may be apart, as a share.
    :raises JobError: when they differ, or the first differs from itself.
    """

    hooks: dict[int, dict[str, int]] = {}

    def loss_of(model: nn.Module) -> float:
        with UsersState(job, model).put_back(), ModuleState(model.modules()).put_back():
            found = loss(model, copy.deepcopy(batch))
            hooks[id(model)] = _gradient_hooks(model)
            return found

    def differ(one: float, other: float) -> bool:
        return not abs(one - other) <= allowed * max(abs(other), 1e-2)

    device = next((p.device for p in parameters_of(trained)), torch.device("cpu"))
    saved = trained.state_dict(keep_vars=True)
    kept = {name: tensor.detach() for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}
    named = {name: p.detach() for name, p in trained.named_parameters()}
    if dict(another.named_parameters()).keys() != named.keys():
        return
    model_attributes.take_away(another, attributes)
    resumed = whole.with_weights(another, {**kept, **named}, {}).to(device)
    model_attributes.put(resumed, attributes, device)
    job_globals.put_into_functions(resumed, in_functions)
    passing = _passing_buffers(trained, resumed, set(kept))
    versions = [p._version for p in parameters_of(trained)]
    expected, found = loss_of(trained), loss_of(resumed)
    if versions != [p._version for p in parameters_of(trained)]:
        return
    if differ(found, expected):
        if differ(again := loss_of(trained), expected):
            raise JobError(_BY_CHANCE.format(expected, again))
        raise _lost(found, expected, passing)
    _refuse_other_hooks(hooks[id(trained)], hooks[id(resumed)])


def _lost(found: float, expected: float, passing: Sequence[str]) -> JobError:
    """What is said of a model whose loss is ``found`` after a resume, in the place of ``expected``.

    :param passing: buffers that are too large to be saved.
    """
    told = (
        f"its buffers {passing} are too large to be saved (persistent=False)"
        if passing
        else "generators or modules in plain lists may remember it"
    )
    return JobError(
        "training depends on something that it changes, and that a job that is resumed would lose: with "
        "the weights, buffers and attributes that a checkpoint keeps, the loss of a batch is "
        f"{found:.6g} in the place of {expected:.6g} ({told}). Keep it in a buffer (register_buffer), or "
        "in a number, tensor or container that is a module's attribute; or let the module's "
        "get_extra_state() return it, and set_extra_state() take it. If it may be lost, "
        "Job(trust=[...]) with the technique's name leaves it unchecked"
    )


def _refuse_other_hooks(trained: Mapping[str, int], resumed: Mapping[str, int]) -> None:
    """:raises JobError: where the gradients of what goes on would be changed by other hooks."""
    for name in {**trained, **resumed}:
        if trained.get(name, 0) != resumed.get(name, 0):
            raise JobError(
                f"training adds or removes hooks on gradients: {name!r} has {trained.get(name, 0)} of them "
                f"after some steps, and {resumed.get(name, 0)} where a job that is resumed goes on from "
                "there. Leave the hook there, and let it look at an attribute of the module or at a buffer. "
                "If it may be lost, Job(trust=[...]) with the technique's name leaves it unchecked"
            )


def _gradient_hooks(model: nn.Module) -> dict[str, int]:
    """How many hooks on gradients each of a model's parameters and modules has, where it has some."""
    of_parameters = {
        name: len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())
        for name, p in model.named_parameters()
    }
    of_modules = {
        name or "the model": len(module._backward_hooks) + len(module._backward_pre_hooks)
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    }
    return {name: count for name, count in {**of_modules, **of_parameters}.items() if count}


def _passing_buffers(trained: nn.Module, another: nn.Module, kept: set[str]) -> list[str]:
    """Names of the buffers that have changed and that no checkpoint has, since they are not persistent."""
    before = dict(another.named_buffers())
    return [
        name
        for name, buffer in trained.named_buffers()
        if name not in kept
        and (then := before.get(name)) is not None
        and (then.shape != buffer.shape or not torch.equal(then.to(buffer), buffer))
    ]
