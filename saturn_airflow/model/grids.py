"""Grids of jobs: every combination of the values that users vary."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from saturn_airflow.model.arguments import plain
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job
from saturn_airflow.model.variations import Variations


def grid(
    job: Job, dotted: Mapping[str, Iterable[Any]] | None = None, /, **values: Iterable[Any]
) -> list[Job]:
    """Every combination of ``values``, each as a job of its own.

    A key is a hyper-parameter, or a key that ``job.model_args`` or ``job.data_args`` already has. The
    placeholders in the job's name are filled with the values: ``"gpt2-{lr}-{batch_size}"``.

    :param dotted: the same for keys with dots, which reach into a mapping: ``{"optimizer_args.weight_decay":
        [0.0, 0.1], "model_args.config.layers": [2, 4]}``. In names the last part is enough:
        ``"gpt2-{weight_decay}"``.
    :raises InvalidSweepError: for a key that is nowhere to be put, no values, or names that come out equal.
    """
    varied = {**(dotted or {}), **values}
    variations = Variations(job, varied, "grid")
    choices_of = {key: choices(key, given, "grid", "a list of values") for key, given in varied.items()}
    jobs = [
        variations.job(dict(zip(choices_of, combination, strict=True)))
        for combination in itertools.product(*choices_of.values())
    ]
    in_name = variations.in_name()
    missing = [
        key.rpartition(".")[2]
        for key, found in choices_of.items()
        if len(found) > 1 and not in_name & {key, key.rpartition(".")[2]}
    ]
    hint = "".join(f"-{{{key}}}" for key in missing)
    variations.check_names(
        jobs, f"name the job '{job.name}{hint}'" if missing else "a value stands twice in the grid"
    )
    return jobs


def choices(key: str, given: Any, what: str, wanted: str) -> list[Any]:
    """The values that a user lists for a key.

    :raises InvalidSweepError: when that is no list, or empty.
    """
    if isinstance(given, str) and "{{" in given:
        raise InvalidSweepError(
            f"{what}: {key} is {given!r:.80}, and how many jobs there are is settled before templates are "
            f"rendered; call {what} in an upstream task, as dags/jobs_from_upstream.py does"
        )
    if isinstance(given, str | Mapping | set | frozenset) or not isinstance(given, Iterable):
        if hasattr(given, "ppf"):
            wanted += f", or draw from it: sample(job, 10, {key}=...)"
        raise InvalidSweepError(f"{what}: {key} is {given!r:.80}; give {wanted}")
    if not (found := [plain(choice) for choice in given]):
        raise InvalidSweepError(f"{what}: {key} has no values")
    return found
