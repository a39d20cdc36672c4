"""What Airflow's provider manager reads: the package's name and its configuration section."""

from __future__ import annotations

from typing import Any


def _option(
    description: str,
    example: str,
    default: str | None = None,
    type_: str = "string",
    version_added: str = "0.1.0",
) -> dict[str, str | None]:
    """An option in the form of Airflow's ``config`` schema of providers."""
    return {
        "description": description,
        "version_added": version_added,
        "type": type_,
        "example": example,
        "default": default,
    }


#: What ``[saturn]`` may say in Airflow's configuration.
_OPTIONS = {
    "home": _option(
        "Folder for checkpoints and progress of jobs; shared by all nodes where jobs may "
        "move between them. Default: the folder saturn below AIRFLOW_HOME.",
        "/mnt/shared/saturn",
    ),
    "nodes": _option(
        "The nodes of sweeps that name none, each as name:devices:kind. Default: the nodes "
        "that announced themselves with `saturn devices --announce` in the home folder.",
        "gpu-a:8:a100, gpu-b:8:a100",
    ),
    "shares": _option(
        "Teams and their shares of the devices, as team:share with commas between them, for sweeps with "
        "team=. Sweeps of a team that used more of late go later. Default: no team has one.",
        "vision: 0.5, text: 0.3",
        version_added="0.2.0",
    ),
    "priorities": _option(
        "The highest priority= that sweeps of a team may have, as team:number with commas between them; "
        "* is for all others. Default: any.",
        "vision: 10, *: 0",
        version_added="0.2.0",
    ),
    "outlive_seconds": _option(
        "How long training goes on when its task is gone and no further try has come, in "
        "seconds. It then writes a checkpoint and ends.",
        "3600",
        default="1800",
        type_="float",
    ),
    "keep_sweeps_days": _option(
        "How long the files of ended sweeps (checkpoints, progress) are kept, in days. "
        "0 keeps them for ever. What MLflow has not taken yet is never removed.",
        "90",
        default="30",
        type_="float",
    ),
    "checkpoints_budget": _option(
        "How much disk the checkpoints of all sweeps may take. What is more goes, the oldest "
        "that others stand in for first, never the last of a job that has not finished. "
        "Default: no limit.",
        "2 TB",
        version_added="0.2.0",
    ),
    "job_memory": _option(
        "How much of a node's host memory the processes of one job may use together: an "
        "amount, or a part of what the machine or container has; 0 for all they want. "
        "What uses more fails, before the node does.",
        "64 GB",
        default="0.9",
        version_added="0.2.0",
    ),
    "leases_folder": _option(
        "Folder of the locks that keep two processes off one device; local to each machine, "
        "the same for all that use its devices (docs/security.md for several users). "
        "Default: .local/state/saturn/leases in the home folder of the worker's user.",
        "/var/lib/saturn-leases",
    ),
    "techniques_folder": _option(
        "Folder, or several with ':' between them, whose files are techniques of your own.",
        "/opt/airflow/techniques",
    ),
    "allowed_modules": _option(
        "Modules that jobs may name functions of, with commas between them; each allows "
        "what is below it. Default: for jobs in DAG files all but Python's standard library; "
        "for jobs from upstream tasks what lies beside the DAG files, and what the DAG's "
        "file names.",
        "shop, transformers",
        version_added="0.2.0",
    ),
    "pass_environment": _option(
        "Environment variables of the worker that the code of jobs gets besides those of "
        "CUDA, clouds and libraries (docs/security.md): names or patterns, with commas "
        "between them. * passes all.",
        "SHOP_*, FEATURE_STORE_URL",
        version_added="0.2.0",
    ),
    "mlflow_url": _option(
        "MLflow's address as people open it, for links to its runs. Default: the one by which tasks ask it, "
        "which in a network of containers no browser may know.",
        "https://mlflow.example.com",
        version_added="0.2.0",
    ),
    "group": _option(
        "A group whose members may read and write what sweeps keep in [saturn] home, where workers run "
        "as several users. Default: the worker's user alone may.",
        "gpu-users",
        version_added="0.2.0",
    ),
    "check_references": _option(
        "Check that what jobs refer to exists when a DAG file is parsed. Turn it off where "
        "the modules are installed only on the nodes.",
        "True",
        default="True",
        type_="boolean",
    ),
}


def get_provider_info() -> dict[str, Any]:
    """Describe this package to Airflow (entry point ``apache_airflow_provider``)."""
    return {
        "package-name": "saturn-airflow",
        "name": "Saturn",
        "description": "Trains many models at once, each under the parallelism that is best for all of them.",
        "config": {"saturn": {"description": "Saturn: sweeps of training jobs.", "options": _OPTIONS}},
    }
