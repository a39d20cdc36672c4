"""What is checked of a sweep's jobs: when a DAG file is parsed, and again when the first task has them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from airflow.sdk import XComArg, conf

from saturn_airflow.model import clear_secrets, references
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.jobs import Job, check_jobs, check_metric
from saturn_airflow.model.settings import SweepSettings
from saturn_airflow.operators.context import limit_users_code, use_techniques_folder
from saturn_airflow.operators.wave_tasks import check_map_length


def check_in_file(jobs: Sequence[Job] | XComArg, settings: SweepSettings) -> None:
    """Check jobs when the DAG file is parsed; those of an upstream task are when they are known.

    :raises InvalidSweepError: naming the job, what is wrong and the fix.
    """
    if isinstance(jobs, XComArg):
        return
    if isinstance(jobs, Job):
        raise InvalidSweepError(f"jobs is the job {jobs.name!r} alone; give a list: jobs=[Job(...)]")
    if not isinstance(jobs, Sequence) or isinstance(jobs, str):
        raise InvalidSweepError(
            f"jobs is {jobs!r:.60}; give a list of jobs, grid(...), or the output of an upstream task"
        )
    check(jobs, settings)
    limit_users_code()
    for message in clear_secrets.warnings(jobs):
        warnings.warn(message, stacklevel=3)
    with references.looked_up_once():
        for job in jobs:
            job.check_allowed()
        if conf.getboolean("saturn", "check_references", fallback=True):
            for job in jobs:
                job.check_references()
    least = getattr(settings.selection, "min_epochs", 0)
    longest = [job.hparams.epochs for job in jobs]
    if longest and all(epochs is not None and epochs < least for epochs in longest):
        raise InvalidSweepError(
            f"selection: min_epochs is {least}, but no job trains so long, so none would ever be dropped"
        )


def check(jobs: Sequence[Job], settings: SweepSettings) -> None:
    """Check jobs by themselves, what they say of the cluster and of the library, and what compares them.

    :raises InvalidSweepError: for a mistake in a job, a node or a technique that does not exist, a metric
        that a job does not have, or too many jobs to map.
    """
    from saturn_airflow import library

    use_techniques_folder()
    check_jobs(jobs)
    cluster, techniques = settings.cluster, settings.techniques
    in_library = library.names() if any(job.techniques is not None or job.trust for job in jobs) else []
    for job in jobs:
        library.check_names(job.techniques or (), f"job {job.name!r}", in_library)
        library.check_names(job.trust, f"job {job.name!r}: trust", in_library)
        if (
            techniques is not None
            and job.techniques is not None
            and not set(job.techniques) & set(techniques)
        ):
            raise InvalidSweepError(
                f"job {job.name!r} may use {', '.join(job.techniques)}, the sweep {', '.join(techniques)}; "
                "give the sweep the job's techniques too"
            )
        for node in job.nodes or ():
            if node not in {n.name for n in cluster}:
                raise InvalidSweepError(
                    f"job {job.name!r} is bound to node {node!r}; "
                    f"the cluster has {', '.join(n.name for n in cluster)}"
                )
    check_map_length(len(jobs), "jobs")
    for what, metric in settings.compared_by.items():
        check_metric(metric, jobs, what)
