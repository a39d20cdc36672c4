"""Links from a task to where its results are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink, XCom

from saturn_airflow.operators.context import MLFLOW_URL_KEY

if TYPE_CHECKING:
    from airflow.models.taskinstancekey import TaskInstanceKey
    from airflow.sdk import BaseOperator


class MlflowRunLink(BaseOperatorLink):
    """From a task of a sweep to its MLflow run, where MLflow has a UI to link to."""

    name = "MLflow run"
    xcom_key = MLFLOW_URL_KEY

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address of the run that the task pushed, or nothing."""
        return XCom.get_value(ti_key=ti_key, key=MLFLOW_URL_KEY) or ""
