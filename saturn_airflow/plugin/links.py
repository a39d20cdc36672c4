"""Links from a task to where its results are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class MlflowRunLink(BaseOperatorLink):
    """From a task of a sweep to its MLflow run, where MLflow has a UI to link to."""

    name = "MLflow run"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address of the run that the task wrote to, or nothing.

        Airflow asks for it where the task ran, when it has ended, and keeps the answer.
        """
        return getattr(operator, "mlflow_url", None) or ""
