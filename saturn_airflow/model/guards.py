"""What the guard (:mod:`saturn_airflow.training.guarding`) says of strategies, and of which jobs it holds."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

from saturn_airflow.model import code_digest
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.plain_numbers import is_number

#: A technique trains the job as one device does, to the last digits of the number format.
EXACT = "exact"
#: Its random numbers, such as dropout's masks, are others than one device draws; all else is the same.
DISTRIBUTION = "distribution"
#: The job said that it need not be checked.
TRUSTED = "trusted"
#: Begins the verdict where nothing could be compared, and
NOT_CHECKED = "not checked"
#: where something was, and differed.
REFUSED = "refused"
#: Begins the verdict where the job's training ran out of memory, which its trial had not.
RAN_OUT = f"{REFUSED}: memory ran out in training"

# Characters.
_LONGEST = 600

# What can't change whether a technique trains as one device does.
_JOB = (
    *("name", "techniques", "nodes", "neutral", "trust", "exact", "metrics", "init_from", "init_missing"),
    *("on_step", "on_epoch"),
)
# Where these name code.
_CODE = ("load_model", "load_dataloader", "load_eval_dataloader", "loss_function")
_CODE_OF_HPARAMS = ("optimizer", "parameter_groups")
_HPARAMS = ("lr", "seed", "epochs", "batches", "lr_scheduler", "lr_scheduler_args", "early_stopping")


def mark(job: Job, technique_version: str) -> str:
    """What verdicts on ``job`` are remembered by: 16 hexadecimal digits.

    It is made of the job's definition without learning rate, seed and length, and without what the job
    declares :attr:`~saturn_airflow.model.jobs.Job.neutral`; of the numbers among the optimizer's arguments it
    counts which are 0. Versions of Saturn, torch and the technique count, and what the code says that the
    job names (:func:`~saturn_airflow.model.code_digest.of`).
    """
    fields = {key: value for key, value in job.fields().items() if key not in _JOB}
    hparams = {key: value for key, value in fields.pop("hparams", {}).items() if key not in _HPARAMS}
    if fields.get("load_eval_dataloader") is None:
        fields.pop("load_eval_dataloader", None)
    if job.in_micro_batches:  # and so compared with other steps
        fields["in_micro_batches"] = True
    arguments = {key: _kind(value) for key, value in hparams.pop("optimizer_args", {}).items()}
    clips = hparams.pop("clip_grad_norm", None) is not None
    for name in ("model_args", "data_args"):
        fields[name] = counting(fields.get(name, {}), job)
    code = code_digest.of(_named(job))
    facts = [fields, counting(hparams, job), arguments, clips, versions(), technique_version, code]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def own_code(job: Job) -> str:
    """A digest of the job's own modules as they are here now; empty where none is found."""
    return code_digest.of_own(_named(job))


def versions() -> dict[str, str]:
    """Those of what verdicts depend on, by its name."""
    return {name: _version(name) for name in ("saturn-airflow", "torch")}


def allows(job: Job, technique: str, verdict: str | None) -> bool:
    """Whether ``job`` may be trained under a technique of which the guard said ``verdict``, if anything."""
    if verdict is None or (technique in job.trust and not verdict.startswith(RAN_OUT)):
        return True
    if verdict.startswith(REFUSED):
        return False
    return not job.exact or verdict in (EXACT, TRUSTED)


def in_words(verdict: str | None) -> str:
    """A verdict as people read it: a few words, and after a colon why, where that is to be said."""
    if verdict is None:
        return "not compared yet"
    if verdict == TRUSTED:
        return "not compared: the job trusts it"
    return "equal in distribution: its random numbers are others" if verdict == DISTRIBUTION else verdict


def refused(reason: str) -> str:
    """The verdict that refuses for ``reason``, as short as its place in a record wants it."""
    verdict = f"{REFUSED}: {reason}"
    return verdict if len(verdict) <= _LONGEST else f"{verdict[: _LONGEST - 1]}…"


def ran_out(reason: str) -> str:
    """The verdict on what ran out of memory in training, with ``reason`` as its error."""
    return refused(f"{RAN_OUT.removeprefix(f'{REFUSED}: ')} ({reason})")


def _named(job: Job) -> frozenset[str]:
    fields = job.fields()
    hparams = fields.get("hparams", {})
    return frozenset(filter(None, [*map(fields.get, _CODE), *map(hparams.get, _CODE_OF_HPARAMS)]))


def _kind(value: Any) -> Any:
    """``value`` with a word in the place of each number: whether it is 0."""
    number = is_number(value)
    if isinstance(value, list):
        return [_kind(item) for item in value]
    return ("some" if value else "none") if number else value


def counting(values: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """``values`` without those that the job declares neutral."""
    return {name: value for name, value in values.items() if name not in job.neutral}


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
