"""Fingerprints: what decides a job's speed. Jobs with one fingerprint share their trials."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json

from saturn_airflow.model.guards import counting
from saturn_airflow.model.jobs import Job

#: Hyper-parameters that change what a model learns, never how long one batch takes.
NEUTRAL = (
    "epochs",
    "batches",
    "lr",
    "optimizer_args",
    "lr_scheduler_args",
    "seed",
    "clip_grad_norm",
    "early_stopping",
)


def speed_versions() -> dict[str, str]:
    """Versions of what can change every job's speed; estimates under others do not count."""
    try:
        return {"torch": importlib.metadata.version("torch")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def fingerprint(job: Job) -> str:
    """The fingerprint of ``job``: 16 hexadecimal digits.

    Model, data and loss with their arguments count, metrics, how batches can be cut, and those
    hyper-parameters that can change the speed (batch size, optimizer, precision, accumulation, compilation).
    Of ``clip_grad_norm``, ``lr_scheduler`` and ``parameter_groups`` it counts whether they are used. Names,
    learning rates, seeds, the number of epochs, and what the job declares
    :attr:`~saturn_airflow.model.jobs.Job.neutral` do not.
    """
    hparams = {f.name: getattr(job.hparams, f.name) for f in dataclasses.fields(job.hparams)}
    speed = {name: value for name, value in hparams.items() if name not in NEUTRAL}
    speed["clips"] = job.hparams.clip_grad_norm is not None
    speed["schedules"] = speed.pop("lr_scheduler") is not None
    facts = {
        "model": [job.load_model, counting(job.model_args, job)],
        "data": [job.load_dataloader, counting(job.data_args, job)],
        "loss": job.loss_function,
        "hparams": counting(speed, job),
    }
    # These decide which techniques can train a job at all, or in which memory.
    more = ("batch_dim", "couples_batch", "metrics", "own_step", "trainer", "in_micro_batches")
    facts.update({name: getattr(job, name) for name in more if getattr(job, name)})
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
