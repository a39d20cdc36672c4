"""The trained model by itself: what a checkpoint holds of it, as one file that people know how to load."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import nn

from saturn_airflow.launch.checkpoint_files import manifest_of
from saturn_airflow.model import clear_secrets, disks, json_text
from saturn_airflow.model.errors import InvalidSweepError, SaturnError
from saturn_airflow.model.initial_weights import WEIGHTS
from saturn_airflow.model.jobs import Job
from saturn_airflow.training import model_code, pyfunc
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.loading import made_model
from saturn_airflow.training.model_attributes import GONE, name_of

JOB, REQUIREMENTS = "job.json", "requirements.txt"
#: The folder of the code that makes the model, and the module in it that MLflow calls.
CODE, LOADER = "code", "saturn_model.py"
#: The folder for the adapters of a model of PEFT's, and what the names of its weights begin with.
ADAPTER, _OF_PEFT = "adapter", "base_model."
# What names begin with in the state of a module around a model.
_AROUND = ("module.", "_orig_mod.")
# What makes the models that are being loaded just now: a load_model may load another one.
_making: ContextVar[tuple[str, ...]] = ContextVar("making", default=())


def export_model(checkpoint: str | Path, job: Job, folder: str | Path) -> Path:
    """Write the model of a checkpoint to ``folder``: its weights, its job, and the user's code.

    Weights have the names they have in the job's model, tied ones the first of their names. The file is
    whole or not there. Called by one process alone; the weights must fit into its memory.

    :returns: ``folder``.
    """
    with _whole(Path(folder), job) as temporary:
        weights = read_weights(checkpoint)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt", **_buffers_of_training(checkpoint)})
        if all(name.startswith(_OF_PEFT) for name in weights):
            _save_adapters(weights, job, temporary / ADAPTER)
    return Path(folder)


def _buffers_of_training(checkpoint: str | Path) -> dict[str, str]:
    """The buffers that training has made, and those that it has taken away, for whoever loads the weights."""
    manifest = manifest_of(Path(checkpoint))
    made = [name.removeprefix("model.") for name in manifest.get("late_buffers", {})]
    gone = {
        name_of(prefix, key): as_none
        for prefix, own in manifest.get("model_attributes", {}).items()
        for key, as_none in own.get(GONE, {}).get("buffers", {}).items()
    }
    told: dict[str, Any] = {"made": made, "gone": gone}
    return {what: json.dumps(names) for what, names in told.items() if names}


def _save_adapters(weights: Mapping[str, torch.Tensor], job: Job, folder: Path) -> None:
    """Write the adapters of a model of PEFT's as PEFT does, to be loaded without Saturn."""
    try:
        model: Any = made_model(job)
        if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
            model.load_state_dict(dict(weights), strict=False)  # tied weights have one of their names
            model.save_pretrained(str(folder))
    except Exception as error:  # the whole model is there all the same
        shutil.rmtree(folder, ignore_errors=True)
        warnings.warn(f"the adapters can't be written by themselves ({error})", stacklevel=2)


def export_trained(model: nn.Module | Mapping[str, torch.Tensor], job: Job, folder: str | Path) -> Path:
    """Write a job's trained model to ``folder``, as :func:`export_model` does.

    :param model: what the job's ``load_model`` gives, trained, or its ``state_dict()``.
    :returns: ``folder``.
    :raises ValueError: when its tensors are not those of the job's model.
    """
    whole: nn.Module = made_model(job)
    given = model.state_dict() if isinstance(model, nn.Module) else model
    try:
        whole.load_state_dict(_unwrapped(given, whole.state_dict().keys()))
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"what was exported is not the model that load_model {str(job.load_model)!r} gives: {why}"
        ) from error
    with _whole(Path(folder), job) as temporary:
        save_model(whole, str(temporary / WEIGHTS), metadata={"format": "pt"})
    return Path(folder)


def _unwrapped(weights: Mapping[str, torch.Tensor], names: Set[str]) -> dict[str, torch.Tensor]:
    """``weights`` by ``names``, those of the model, where they have the names of the module that
    DistributedDataParallel or torch.compile puts around it."""
    named = dict(weights)
    while named.keys() != names:
        around = next((w for w in _AROUND if named and all(name.startswith(w) for name in named)), None)
        if around is None:
            break
        named = {name.removeprefix(around): weight for name, weight in named.items()}
    return named


@contextmanager
def _whole(folder: Path, job: Job) -> Iterator[Path]:
    """A folder for the weights, which becomes ``folder`` when they are there."""
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    written = job.fields()
    for name in ("model_args", "data_args"):
        if name in written:
            written[name] = clear_secrets.left_out(written[name])
    (temporary / JOB).write_text(json.dumps(written, indent=2))
    requirements = model_code.carry(str(job.load_model), temporary / CODE)
    (temporary / REQUIREMENTS).write_text("\n".join(requirements) + "\n")
    shutil.copyfile(pyfunc.__file__, temporary / CODE / LOADER)
    # A machine that loses its power must not leave a model whose numbers are zeros.
    disks.sync(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def load_exported(
    folder: str | Path,
    allowed_modules: Collection[str] | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The trained model that :func:`export_model` wrote, on the CPU and in evaluation mode.

    :param folder: the folder, such as ``mlflow.artifacts.download_artifacts(result["best"]["model_uri"])``.
        Its ``job.json`` names the function that makes the model, which is imported and called: load what
        you trust, or say what may be imported.
    :param allowed_modules: modules (with all below them) that the function may be of; None for what
        ``SATURN_ALLOWED_MODULES`` names, or all but the standard library where it names nothing.
    :param model_args: values of arguments of that function, in the places of those that ``job.json`` has; it
        has none of secrets, so these have to be given.
    :raises SaturnError: when the folder holds no exported model, a damaged one, or one that loads itself.
    :raises InvalidSweepError: when the module of the job's ``load_model`` can't be found here, or may not be
        imported.
    """
    path = Path(folder)
    if not (path / WEIGHTS).is_file() or not (path / JOB).is_file():
        raise SaturnError(f"{path} holds no trained model: {WEIGHTS} and {JOB} are expected there")
    try:
        job = Job.from_dict(json_text.parse((path / JOB).read_text()))
    except (ValueError, InvalidSweepError) as error:
        raise SaturnError(f"{path / JOB} is damaged: {error}") from None
    if model_args:
        job = replace(job, model_args={**job.model_args, **model_args})
    made_by = json.dumps([job.load_model, job.model_args], sort_keys=True)
    if made_by in _making.get():
        raise SaturnError(
            f"load_model {job.load_model!r} loads a model that it made itself, and so on without end: "
            "let it make the model alone, and say Job(init_from=...) for the weights to start from"
        )
    token = _making.set((*_making.get(), made_by))
    try:
        model: nn.Module = made_model(job, allowed_modules)
    finally:
        _making.reset(token)
    try:
        pyfunc.load_weights(model, path / WEIGHTS)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise SaturnError(f"{path / WEIGHTS} is damaged, or of another model: {error}") from None
    return model.eval()
