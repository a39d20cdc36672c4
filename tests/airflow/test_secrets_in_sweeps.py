"""A whole sweep whose jobs take secrets: they arrive, and are found nowhere afterwards."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from saturn_airflow import Secret

pytestmark = pytest.mark.services
# Each in a form of its own in JSON, in Python, in URLs.
PASSWORD, TOKEN = "open/sesame \"ü\" 'now' \\ 4711", "token+of=the&shop/0815"
MASKED = "***"


@pytest.fixture(scope="module")
def swept(deployment: Any) -> Any:
    extra = json.dumps({"api_token": TOKEN, "region": "north"})
    body = {"connection_id": "shop_db", "conn_type": "generic", "login": "ann", "password": PASSWORD}
    deployment.airflow._client.post("/connections", json={**body, "extra": extra}).raise_for_status()
    run_id = deployment.start("secret_sweep")
    deployment.wait("secret_sweep", run_id)
    return run_id, deployment.airflow.xcom("secret_sweep", run_id, "sweep.report")


def test_the_digest_in_the_dag_file_is_that_of_these_secrets() -> None:
    text = (Path(__file__).parent / "dags" / "secret_takers.py").read_text()
    assert hashlib.sha256(f"{PASSWORD}|{TOKEN}".encode()).hexdigest() in text


def test_secrets_arrive_and_are_found_nowhere(
    deployment: Any, swept: Any, figure: Callable[[str], None]
) -> None:
    run_id, result = swept
    outcomes = {outcome["job"]: outcome for outcome in result["jobs"]}
    assert outcomes["reads"]["status"] == "finished", outcomes
    assert f"can't log in to {MASKED} with {MASKED}" in outcomes["can-not-log-in"]["reason"]
    printed = _printed(deployment.job_folder("secret_sweep", run_id, "reads"))
    for told in ("logs in with ***", "soon there is no login with '***'", "a token '***' was taken"):
        assert told in printed
    run = mlflow.MlflowClient(deployment.services.mlflow_url).get_run(outcomes["reads"]["run_id"])
    assert (run.data.params["token"], run.data.tags["login"]) == (MASKED, f"'{MASKED}' or {MASKED}")

    state, looked_at = deployment.services.state, 0
    forms = {
        form.encode()
        for secret in (PASSWORD, TOKEN)
        for form in (
            secret,
            json.dumps(secret)[1:-1],
            json.dumps(json.dumps(secret))[3:-3],
            repr(secret)[1:-1],
        )
    }
    found = []
    for path in state.rglob("*"):
        # Airflow keeps its connections there; what else it has is looked at below.
        if path.is_file() and not path.name.startswith("airflow.db"):
            looked_at += 1
            data = path.read_bytes()
            found += [str(path.relative_to(state)) for form in forms if form in data]
    assert found == []
    rows, tables = 0, set()
    with sqlite3.connect(f"file:{state / 'airflow' / 'airflow.db'}?mode=ro", uri=True) as database:
        for (table,) in database.execute("select name from sqlite_master where type = 'table'").fetchall():
            for row in database.execute(f'select * from "{table}"'):
                rows += 1
                data = b"|".join(v if isinstance(v, bytes) else str(v).encode() for v in row)
                if any(form in data for form in forms):
                    tables.add(table)
    assert tables <= {"connection"}, "XComs, rendered fields, serialised DAGs, logs"
    figure(f"looked for two secrets in {looked_at} files and {rows} rows of Airflow's database")


def test_the_exported_model_has_the_reference(deployment: Any, swept: Any) -> None:
    _, result = swept
    uri, server = result["best"]["model_uri"], deployment.services.mlflow_url
    folder = Path(mlflow.artifacts.download_artifacts(uri, tracking_uri=server))
    job = json.loads((folder / "job.json").read_text())
    assert job["model_args"]["password"] == Secret("shop_db", "password")


def in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _printed(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.rglob("output.log"))
