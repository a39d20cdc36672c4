"""Databases and their users, on a real Postgres."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import yaml

from saturn_airflow.deployment import databases
from saturn_airflow.deployment.local import LocalCluster

pytestmark = [pytest.mark.services, pytest.mark.timeout(360)]
COMPOSE = Path(__file__).parents[2] / "docker" / "compose.yaml"
PASSWORDS = {"airflow": "a-1", "celery": "c '\"\\%s", "mlflow": "m-1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("databases")
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    (folder / "compose.yaml").write_text(yaml.safe_dump({"services": {"postgres": services["postgres"]}}))
    with LocalCluster(folder / "state", folder / "compose.yaml", folder) as cluster:
        yield cluster


@pytest.fixture
def owner(server: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How the owner of all logs in, as libpq takes it from the environment."""
    variables = server.variables
    found = {
        "PGHOST": "127.0.0.1",
        "PGPORT": variables["POSTGRES_PORT"],
        "PGUSER": "saturn",
        "PGPASSWORD": variables["POSTGRES_PASSWORD"],
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    for name, password in PASSWORDS.items():
        monkeypatch.setenv(f"{name.upper()}_DATABASE_PASSWORD", password)
    return found


def run(user: str, database: str, *statements: str, password: str | None = None) -> list[Any]:
    connection = psycopg2.connect(dbname=database, user=user, password=password or PASSWORDS.get(user))
    try:
        connection.autocommit = True
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def test_a_database_is_its_users_alone(owner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # As an earlier version left it: one account owns everything.
    old = """
        CREATE TYPE mood AS ENUM ('good');
        CREATE TABLE runs (id serial PRIMARY KEY, other bigint GENERATED ALWAYS AS IDENTITY, how mood);
        CREATE SEQUENCE apart;
        CREATE VIEW seen AS SELECT id FROM runs;
        INSERT INTO runs (how) VALUES ('good');
    """
    run("saturn", "postgres", "CREATE DATABASE airflow", password=owner["PGPASSWORD"])
    run("saturn", "airflow", textwrap.dedent(old), password=owner["PGPASSWORD"])
    for _ in range(2):
        assert databases.main() == 0
        for name in PASSWORDS:
            run(name, name, "CREATE TABLE IF NOT EXISTS mine (n int)", "INSERT INTO mine VALUES (1)")
        assert run("airflow", "airflow", "INSERT INTO runs (how) VALUES ('good')", "SELECT * FROM seen")
    migration = "ALTER TYPE mood ADD VALUE 'bad'", "ALTER TABLE runs ADD COLUMN n int", "DROP SEQUENCE apart"
    run("airflow", "airflow", *migration)
    for name in PASSWORDS:
        for other in {*PASSWORDS, "postgres", "saturn"} - {name}:
            if other == "postgres":
                with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                    run(name, other, "CREATE TABLE public.theirs (n int)")
            elif other != "saturn":
                with pytest.raises(psycopg2.OperationalError, match="permission denied for database"):
                    run(name, other)
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            run(name, name, "CREATE ROLE more LOGIN")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            run(name, name, "COPY (SELECT 1) TO PROGRAM 'true'")
    assert not any(password in capsys.readouterr().out for password in PASSWORDS.values())


def test_a_new_password_counts_from_the_next_run_on(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    databases.main()
    monkeypatch.setenv("MLFLOW_DATABASE_PASSWORD", "another")
    databases.main()
    assert run("mlflow", "mlflow", "SELECT 1", password="another") == [(1,)]
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        run("mlflow", "mlflow", "SELECT 1")
