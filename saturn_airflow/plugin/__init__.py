"""What shows in the Airflow UI: the plan page, the list of sweeps, links."""

from __future__ import annotations

import logging
from functools import cache, cached_property
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from saturn_airflow.plugin import listener
from saturn_airflow.plugin.links import PREFIX, MlflowRunLink, PlanLink

log = logging.getLogger(__name__)

# Relative to the base of Airflow's own page, so that they hold under any [api] base_url.
_VIEWS = [
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


class SaturnPlugin(AirflowPlugin):
    """Saturn in the Airflow UI."""

    name = "saturn"
    operator_extra_links = [MlflowRunLink(), PlanLink()]  # noqa: RUF012 - Airflow's own declaration
    listeners = [listener]  # noqa: RUF012 - the same

    @cached_property
    def external_views(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Where the pages show in the UI; nowhere, where they can't be served."""
        return [dict(view) for view in _VIEWS] if _app() is not None else []

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The app behind the pages; imported where it is served, since every task loads its plugins."""
        app = _app()
        return [] if app is None else [{"app": app, "url_prefix": PREFIX, "name": "Saturn"}]


@cache
def _app() -> Any:
    """The app; None where it can't be loaded, for Airflow itself must be served whatever has moved in it."""
    try:
        from saturn_airflow.plugin.app import app
    except Exception as error:
        log.error("Saturn's pages are left out: they can't be loaded (%s: %s)", type(error).__name__, error)
        return None
    return app
