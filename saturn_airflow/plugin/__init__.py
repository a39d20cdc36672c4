"""What shows in the Airflow UI."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from saturn_airflow.plugin.links import MlflowRunLink


class SaturnPlugin(AirflowPlugin):
    """Saturn's links in the Airflow UI."""

    name = "saturn"
    operator_extra_links = [MlflowRunLink()]  # noqa: RUF012 - Airflow's own declaration
