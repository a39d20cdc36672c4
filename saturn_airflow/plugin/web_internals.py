"""What the pages use of Airflow that is no part of its public interface; a test names what has moved."""

from __future__ import annotations

from airflow.api_fastapi.app import get_auth_manager as get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity as DagAccessEntity
from airflow.api_fastapi.common.db.common import SessionDep as SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep as GetUserDep
from airflow.api_fastapi.core_api.security import PermittedDagRunFilter as PermittedDagRunFilter
from airflow.api_fastapi.core_api.security import get_user as get_user
from airflow.api_fastapi.core_api.security import requires_access_dag as requires_access_dag
from airflow.models.dagrun import DagRun as DagRun
from airflow.models.pool import Pool as Pool
from airflow.models.taskinstance import TaskInstance as TaskInstance
from airflow.models.xcom import XCOM_RETURN_KEY as XCOM_RETURN_KEY
from airflow.models.xcom import XComModel as XComModel
