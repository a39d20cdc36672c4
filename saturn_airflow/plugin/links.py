"""Links from a task to where its results are."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink, conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

    from saturn_airflow.model.settings import SweepSettings

#: Where the API server serves the pages.
PREFIX = "/saturn"


class MlflowRunLink(BaseOperatorLink):
    """From a task of a sweep to its MLflow run, where MLflow has a UI to link to."""

    name = "MLflow run"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address of the run that the task wrote to, or nothing.

        Airflow asks for it where the task ran, when it has ended, and keeps the answer.
        """
        return getattr(operator, "mlflow_url", None) or ""


class PlanLink(BaseOperatorLink):
    """From the task that plans to the page that shows the plan."""

    name = "Plan"
    route = "saturn-plan"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address of the plan page of the task's sweep."""
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        dag, run = quote(ti_key.dag_id, safe=""), quote(ti_key.run_id, safe="")
        settings: SweepSettings = operator.settings  # type: ignore[attr-defined]
        sweep = quote(settings.group, safe="")
        return f"{base}/dags/{dag}/runs/{run}/plugin/{self.route}?sweep={sweep}"
