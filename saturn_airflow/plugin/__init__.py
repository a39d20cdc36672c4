"""What shows in the Airflow UI."""

from __future__ import annotations

from typing import ClassVar

from airflow.plugins_manager import AirflowPlugin

from saturn_airflow.plugin.links import MlflowRunLink


class SaturnPlugin(AirflowPlugin):
    """Saturn's links in the Airflow UI."""

    name = "saturn"
    operator_extra_links: ClassVar[list[MlflowRunLink]] = [MlflowRunLink()]
