"""Loading a job's model: the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from saturn_airflow.launch import handed_over, job_log
from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.jobs import Job
from saturn_airflow.parallelism import caches
from saturn_airflow.parallelism.batch_norm import in_one_process
from saturn_airflow.training import precision, rng, shared_memory
from saturn_airflow.training.frozen import digest
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.without_group import without_group


def made(job: Job, allowed_modules: Collection[str] | None = None) -> Any:
    """What the job's ``load_model`` makes.

    :param allowed_modules: the modules it may be of; None for what is configured.
    """
    arguments = handed_over.arguments(job.model_args, "model_args")
    return references.load(str(job.load_model), allowed_modules)(**arguments)


def made_model(job: Job, allowed_modules: Collection[str] | None = None) -> Any:
    """The model that the job's ``load_model`` makes, of a trainer its model."""
    found = made(job, allowed_modules)
    return found.model if job.trainer else found


def load_model(job: Job) -> nn.Module:
    """The job's model, seeded, on the CPU, in its precision.

    :raises JobError: when it can't be loaded, or is no module that can be trained.
    """
    rng.seed(job.hparams.seed, "model")
    with of_the_job(f"load_model {job.load_model!r}"), job_log.loading(), without_group():
        model = made_model(job)
    if isinstance(getattr(model, "model", None), nn.Module) and hasattr(model, "compute_loss"):
        raise JobError(
            f"load_model {job.load_model!r} returned a {type(model).__name__}, which trains by itself; say "
            "Job(trainer=True) to have it do so, or return its model, and say its arguments as the job's "
            "hyper-parameters (docs/training_step.md has a table)"
        )
    if not isinstance(model, nn.Module):
        raise JobError(
            f"load_model {job.load_model!r} returned a {type(model).__name__}, not a torch.nn.Module"
        )
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise JobError(
            f"parameter {lazy[0]!r} has no shape before the first forward pass; "
            f"load_model {job.load_model!r} has to run the model once on some batch"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if without := [name for name, tensor in tensors if tensor.is_meta]:
        raise JobError(
            f"load_model {job.load_model!r} returned a model whose {without[0]!r} has no data (device "
            "'meta'); make it on the CPU, or fill it with to_empty() and its weights"
        )
    caches.switch_off(model)
    in_one_process(model)
    model = precision.cast_model(model, job.hparams.precision)
    if both := shared_memory.found(model):
        one, other = both
        raise JobError(
            f"{other!r} lies in the memory of the parameter {one!r} and is another tensor, as after "
            "one.weight.data = other.weight.data, nn.Parameter(other.weight.t()) or a detach() without a "
            "copy. A step on one changes the other, until the model is moved to a GPU or split: the result "
            "would depend on the device. Tie weights by one parameter in both places "
            "(one.weight = other.weight), or copy what is to be another one (clone())"
        )
    return model


def check_equal_everywhere(model: nn.Module, ranks: Ranks) -> None:
    """Check by samples of every parameter that all ranks loaded the same model.

    :raises JobError: naming a parameter that differs.
    """
    if ranks.size == 1:
        return
    samples: Mapping[str, int] = {
        name: digest(p.detach().flatten()[:: max(1, p.numel() // 256)])
        for name, p in model.named_parameters()
    }
    for other in ranks.everyones(samples):
        if different := [name for name in samples if other.get(name) != samples[name]]:
            raise JobError(
                f"load_model gave different weights on different ranks (of {different[0]!r}); "
                "draw them from torch's, numpy's or Python's global generator, which Saturn seeds"
            )
