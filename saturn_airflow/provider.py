"""What Airflow's provider manager reads: the package's name and its configuration section."""

from __future__ import annotations

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Describe this package to Airflow (entry point ``apache_airflow_provider``)."""
    return {
        "package-name": "saturn-airflow",
        "name": "Saturn",
        "description": "Trains many models at once, each under the parallelism that is best for all of them.",
        "config": {
            "saturn": {
                "description": "Saturn: sweeps of training jobs.",
                "options": {
                    "home": _option(
                        "Folder for checkpoints and progress of jobs; shared by all nodes where jobs may "
                        "move between them. Default: the folder saturn below AIRFLOW_HOME.",
                        "/mnt/shared/saturn",
                    ),
                    "leases_folder": _option(
                        "Folder of the locks that keep two processes off one device; local to each machine, "
                        "the same for all that use its devices. "
                        "Default: saturn-leases in the folder for temporary files.",
                        "/run/lock/saturn",
                    ),
                    "techniques_folder": _option(
                        "Folder, or several with ':' between them, whose files are techniques of your own.",
                        "/opt/airflow/techniques",
                    ),
                    "check_references": _option(
                        "Check that what jobs refer to exists when a DAG file is parsed. Turn it off where "
                        "the modules are installed only on the nodes.",
                        "True",
                        default="True",
                        type_="boolean",
                    ),
                },
            }
        },
    }


def _option(
    description: str, example: str, default: str | None = None, type_: str = "string"
) -> dict[str, str | None]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": type_,
        "example": example,
        "default": default,
    }
