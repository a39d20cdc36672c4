"""The databases of the compose file: each belongs to a user of its own, who can open no other.

Run as a command it makes them, with the owner's account from libpq's variables (``PGHOST``, ``PGPASSWORD``)
and the users' passwords from ``<NAME>_DATABASE_PASSWORD``. What is there stays: a second run changes
passwords alone. Databases of an earlier deployment, which one account owned, are handed to their user.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

#: Airflow's own, that of Celery's results, and MLflow's; each is named as its user is.
NAMES = ("airflow", "celery", "mlflow")

# Statements that hand what a database has to %(user)s: tables and views, sequences, and enumerations. A
# sequence that belongs to a column follows its table, and can't be handed over by itself.
_OF_OTHERS = """
SELECT format('ALTER TABLE %%s OWNER TO %%I', oid::regclass, %(user)s) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm')
AND relowner <> %(user)s::regrole
UNION ALL
SELECT format('ALTER SEQUENCE %%s OWNER TO %%I', c.oid::regclass, %(user)s) FROM pg_class c
WHERE relnamespace = 'public'::regnamespace AND relkind = 'S' AND relowner <> %(user)s::regrole
AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.objid = c.oid AND d.deptype IN ('a', 'i'))
UNION ALL
SELECT format('ALTER TYPE %%s OWNER TO %%I', oid::regtype, %(user)s) FROM pg_type
WHERE typnamespace = 'public'::regnamespace AND typtype = 'e' AND typowner <> %(user)s::regrole
"""


def make(name: str, password: str) -> None:
    """Make a user and the database of his name, or give them what they lack.

    :param password: kept as PostgreSQL keeps it, and sent in no other form.
    :raises psycopg2.Error: when the server refuses.
    """
    from psycopg2 import extensions, sql

    user = sql.Identifier(name)
    with _connected("postgres") as server:
        cursor = server.cursor()
        cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,))
        verb = sql.SQL("ALTER" if cursor.fetchone() else "CREATE")
        kept = extensions.encrypt_password(password, name, server, "scram-sha-256")
        cursor.execute(
            sql.SQL("{} ROLE {} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD {}").format(
                verb, user, sql.Literal(kept)
            )
        )
        cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
        text = "ALTER DATABASE {0} OWNER TO {0}" if cursor.fetchone() else "CREATE DATABASE {0} OWNER {0}"
        cursor.execute(sql.SQL(text).format(user))
        cursor.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(user))
    with _connected(name) as database:
        cursor = database.cursor()
        cursor.execute(sql.SQL("ALTER SCHEMA public OWNER TO {}").format(user))
        cursor.execute(_OF_OTHERS, {"user": name})
        for (statement,) in cursor.fetchall():
            cursor.execute(statement)


@contextlib.contextmanager
def _connected(database: str) -> Iterator[Any]:
    """A connection as the owner of all databases, each statement by itself."""
    import psycopg2

    connection = psycopg2.connect(dbname=database)
    connection.autocommit = True
    try:
        yield connection
    finally:
        connection.close()


def main() -> int:
    """Make all databases; the exit status."""
    for name in NAMES:
        make(name, os.environ[f"{name.upper()}_DATABASE_PASSWORD"])
        print(f"The database {name} belongs to the user {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
