"""What shows in the Airflow UI: the plan page, the list of sweeps, links."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from saturn_airflow.plugin.links import MlflowRunLink, PlanLink

#: Where the API server serves what this plugin adds.
PREFIX = "/saturn"


class SaturnPlugin(AirflowPlugin):
    """Saturn in the Airflow UI."""

    name = "saturn"
    operator_extra_links = [MlflowRunLink(), PlanLink()]  # noqa: RUF012 - Airflow's own declaration
    # Relative to the base of Airflow's own page, so that they hold under any [api] base_url.
    external_views = [  # noqa: RUF012
        {
            "name": "Sweeps",
            "href": "saturn/sweeps",
            "url_route": "saturn-sweeps",
            "destination": "nav",
            "category": "browse",
            "icon": "saturn/static/saturn.svg",
            "icon_dark_mode": "saturn/static/saturn-dark.svg",
        },
        {
            "name": "Sweeps",
            "href": "saturn/sweeps/{DAG_ID}",
            "url_route": "saturn-dag-sweeps",
            "destination": "dag",
            "icon": "saturn/static/saturn.svg",
            "icon_dark_mode": "saturn/static/saturn-dark.svg",
        },
        {
            "name": "Plan",
            "href": "saturn/plan/{DAG_ID}/{RUN_ID}",
            "url_route": PlanLink.route,
            "destination": "dag_run",
            "icon": "saturn/static/saturn.svg",
            "icon_dark_mode": "saturn/static/saturn-dark.svg",
        },
    ]

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The app behind the pages; imported where it is served, since every task loads its plugins."""
        from saturn_airflow.plugin.app import app

        return [{"app": app, "url_prefix": PREFIX, "name": "Saturn"}]
