"""Mistakes in a job's code and data are named, with the fix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_loop import Told, job, launch, request

from saturn_airflow.launch.request import TrainRequest

pytestmark = pytest.mark.ranks


MISTAKES: dict[str, tuple[TrainRequest, str, str]] = {
    "no model": (
        request(job(load_model="loop_jobs:no_module")),
        "JobError",
        "load_model 'loop_jobs:no_module' returned a str, not a torch.nn.Module",
    ),
    "lazy model": (
        request(job(load_model="loop_jobs:lazy")),
        "JobError",
        "parameter '0.weight' has no shape before the first forward pass",
    ),
    "model without data": (
        request(job(load_model="loop_jobs:without_data")),
        "JobError",
        "load_model 'loop_jobs:without_data' returned a model whose 'weight' has no data (device 'meta')",
    ),
    "load_model raises": (
        request(job(load_model="loop_jobs:refuses")),
        "JobError",
        "load_model 'loop_jobs:refuses' raised OSError: the weights are not here",
    ),
    "the model raises": (
        request(job(load_model="loop_jobs:broken")),
        "JobError",
        "the model raised KeyError: 'attention_mask'",
    ),
    "no loss": (
        request(
            job(
                load_model="loop_jobs:Named",
                loss_function=None,
                data_args={"named": True},
                model_args={"silent": True},
            )
        ),
        "JobError",
        "the model returned no loss (but a SimpleNamespace); give the job a loss_function",
    ),
    "a loss beside what is no count": (
        request(job(loss_function="loop_jobs:loss_and_outputs")),
        "JobError",
        "returned a pair whose second part is a Tensor of shape (",
    ),
    "a second loss in the place of a count": (
        request(job(loss_function="loop_jobs:loss_and_penalty")),
        "JobError",
        "whose count follows from trainable parameters, as a second loss",
    ),
    "groups without parameters": (
        request(job({"parameter_groups": "loop_jobs:groups_without_params"})),
        "JobError",
        "parameter_groups 'loop_jobs:groups_without_params' returned something that is no parameter",
    ),
    "no loss of outputs": (
        request(job(loss_function=None)),
        "JobError",
        "the model returned no loss (but a Tensor); give the job a loss_function",
    ),
    "a loss of other arguments": (
        request(job(loss_function="loop_jobs:loss_of_three")),
        "JobError",
        "loss_function 'loop_jobs:loss_of_three' is called with the model's outputs and the targets: missing",
    ),
    "a class of losses": (
        request(job(loss_function="torch.nn:CrossEntropyLoss")),
        "JobError",
        "loss_function 'torch.nn:CrossEntropyLoss' is a class; name a function such as",
    ),
    "no scalar": (
        request(job(loss_function="loop_jobs:loss_per_sample")),
        "JobError",
        "loss_function 'loop_jobs:loss_per_sample' returned a loss of shape (8,), which is no scalar",
    ),
    "no tensor": (
        request(job(loss_function="loop_jobs:loss_as_number")),
        "JobError",
        "loss_function 'loop_jobs:loss_as_number' returned float as its loss; return the mean over the",
    ),
    "detached": (
        request(job(loss_function="loop_jobs:loss_detached")),
        "JobError",
        "returned a loss that no trainable parameter takes part in; compute it from the model's outputs",
    ),
    "the loss raises": (
        request(job(loss_function="loop_jobs:loss_raises")),
        "JobError",
        "loss_function 'loop_jobs:loss_raises' raised ZeroDivisionError: division by zero",
    ),
    "nothing to train": (
        request(job(model_args={"frozen": True})),
        "JobError",
        "the model has no trainable parameter; leave requires_grad=True on what is to be trained",
    ),
    "trained, and not among its parameters": (
        request(job(load_model="loop_jobs:leaves_out")),
        "JobError",
        "LeavesOut.parameters() leaves out '0.weight', which asks for gradients; set requires_grad=False on",
    ),
    "nested tensors": (
        request(job(load_dataloader="loop_jobs:nested")),
        "JobError",
        "'0' of a batch is a nested tensor, which Saturn can't take apart; give a list with a tensor",
    ),
    "no batch": (
        request(job(load_dataloader="loop_jobs:triples")),
        "JobError",
        "the dataloader gave a list of 3 as a batch; give a mapping of the model's arguments, or a pair",
    ),
    "a field that the model does not take": (
        request(job(load_model="loop_jobs:broken", load_dataloader="loop_jobs:of_rows")),
        "JobError",
        "Broken.forward gets what a batch holds as keyword arguments (x, weights, labels are kept for the "
        "loss function): got an unexpected keyword argument 'weights'. Let it take these names",
    ),
    "a field that is not there": (
        request(job(load_model="loop_jobs:weighing")),
        "JobError",
        "Weighing.forward gets the first part of a batch, which is a pair, and nothing else: missing a "
        "required argument: 'weights'",
    ),
    "wrong groups": (
        request(job({"parameter_groups": "loop_jobs:no_groups"})),
        "JobError",
        "parameter_groups 'loop_jobs:no_groups' returned something that is no parameter of the model",
    ),
    "wrong optimizer argument": (
        request(job({"optimizer_args": {"momentum": 0.9}})),
        "JobError",
        "optimizer 'torch.optim:AdamW' does not take",
    ),
    "closure": (
        request(job({"optimizer": "loop_jobs:NeedsClosure"})),
        "JobError",
        "optimizer 'loop_jobs:NeedsClosure' needs a closure; choose one that steps on gradients alone",
    ),
    "a closure that is asked for in the step": (
        request(job({"optimizer": "families.inventions:Sam"})),
        "JobError",
        "optimizer 'families.inventions:Sam' raised AssertionError: Sam needs a closure",
    ),
    "an optimizer around another": (
        request(job({"optimizer": "families.inventions:LooksAhead"})),
        "JobError",
        "LooksAhead keeps optimizers of its own as its attribute 'optimizer', whose state would be lost",
    ),
    "an optimizer with modes": (
        request(job({"optimizer": "families.inventions:ScheduleFree"})),
        "JobError",
        "evaluates other weights than it trains, and nobody calls its train() and eval() here",
    ),
    "plateau": (
        request(job({"lr_scheduler": "loop_jobs:Plateau"})),
        "JobError",
        "wants 'metrics' in each step; choose one that follows the steps alone",
    ),
    "nan": (
        request(job({"batch_size": 4}, data_args={"nan_at": 9})),
        "NotANumberError",
        "loss is nan at step 3 (epoch 0); the job stopped there: lower lr, set clip_grad_norm, or check",
    ),
}


# What can only go wrong on several devices.
MISTAKES_OF_TWO: dict[str, tuple[TrainRequest, str, str]] = {
    "single": (request(job()), "DoesNotFit", "single uses one device"),
    "spill": (request(job(), technique="spill"), "DoesNotFit", "spill uses one device"),
    "batch norm": (
        request(job(model_args={"norm": True}), technique="pipeline"),
        "DoesNotFit",
        "1 is a BatchNorm1d, whose statistics would be those of each micro-batch of a pipeline",
    ),
    "accumulated batch norm": (
        request(job({"accumulate": 2}, model_args={"norm": True}), technique="ddp"),
        "DoesNotFit",
        "1 is a BatchNorm1d, whose statistics would be those of each of the 2 micro-batches",
    ),
    "lists beside the parameters": (
        request(job({"optimizer": "families.inventions:KeepsLists"}), technique="fsdp"),
        "DoesNotFit",
        "KeepsLists",
    ),
    "different weights": (
        request(job(load_model="loop_jobs:different_on_each_rank"), technique="fsdp"),
        "JobError",
        "load_model gave different weights on different ranks (of '0.weight')",
    ),
    "nothing to cut": (
        request(job(), technique="tensor"),
        "DoesNotFit",
        "Sequential can't be cut for tensor parallelism: it has no tp_plan",
    ),
    "nan on one rank": (
        request(job({"batch_size": 4}, data_args={"nan_at": 9}), technique="fsdp"),
        "NotANumberError",
        "loss is nan at step 3",
    ),
}


@pytest.fixture(scope="module")
def told_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    folder = tmp_path_factory.mktemp("mistakes")
    told: dict[str, Any] = {}
    for size, mistakes in ((1, MISTAKES), (2, MISTAKES_OF_TWO)):
        requests = [
            dataclasses.replace(one, folder=str(folder / f"{size}-{name}"))
            for name, (one, _, _) in mistakes.items()
        ]
        told.update(zip(mistakes, launch(requests, size=size)[0], strict=True))
    return told


@pytest.mark.parametrize("name", [*MISTAKES, *MISTAKES_OF_TWO])
def test_names_the_mistake(name: str, told_of: dict[str, Told]) -> None:
    _, error, says = {**MISTAKES, **MISTAKES_OF_TWO}[name]
    assert told_of[name].get("error") == error, told_of[name]
    assert says in told_of[name]["says"]
