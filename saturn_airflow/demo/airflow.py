"""What the demo asks of Airflow, over its public REST API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import httpx

from saturn_airflow.model.errors import SaturnError

#: How often a request is sent that Airflow answers with an error of its own (status 5xx).
_TRIES = 10


class Airflow:
    """A client of one Airflow. Its methods raise ``httpx.HTTPError`` where Airflow refuses or does not
    answer.

    :param login: user and password; None for an Airflow that lets everybody in.
    """

    def __init__(self, url: str, login: tuple[str, str] | None = None) -> None:
        if login is None:
            answer = httpx.get(f"{url}/auth/token", timeout=30, trust_env=False)
        else:
            body = {"username": login[0], "password": login[1]}
            answer = httpx.post(f"{url}/auth/token", json=body, timeout=60, trust_env=False)
        token = answer.raise_for_status().json()["access_token"]
        self._client = httpx.Client(
            base_url=f"{url}/api/v2",
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
            trust_env=False,
        )

    def wait_for_dag(self, dag_id: str, timeout: float = 240.0) -> None:
        """Wait until the DAG processor has parsed the DAG.

        :raises SaturnError: when it has not within ``timeout`` seconds, with the import errors there are.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._client.get(f"/dags/{dag_id}").status_code == 200:
                return
            time.sleep(0.5)
        errors = self._client.get("/importErrors").json().get("import_errors", [])
        said = "\n".join(error["stack_trace"] for error in errors)
        raise SaturnError(f"Airflow has not parsed the DAG {dag_id!r} after {timeout:.0f} s\n{said}")

    def trigger(self, dag_id: str) -> str:
        """Start a run of the DAG, unpause it, and return the run's id."""
        now = datetime.now(timezone.utc)
        run_id = f"manual__{now:%Y-%m-%dT%H-%M-%S}"
        body = {"logical_date": now.isoformat(), "dag_run_id": run_id}
        self.send("POST", f"/dags/{dag_id}/dagRuns", body)
        self.send("PATCH", f"/dags/{dag_id}", {"is_paused": False})
        return run_id

    def state(self, dag_id: str, run_id: str) -> str:
        """The state of a run: queued, running, success or failed."""
        return str(self.get(f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """All task instances of a run."""
        path, found = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", list[dict[str, Any]]()
        # A deployment may answer with fewer than are asked for ([api] maximum_page_limit).
        while True:
            page = self.get(path, limit=100, offset=len(found), order_by="id")
            found += page["task_instances"]
            if not page["task_instances"] or len(found) >= page["total_entries"]:
                return found

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """What a task pushed, or None."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        answer = self._client.get(path, params={"stringify": False, "deserialize": False})
        return answer.json()["value"] if answer.status_code == 200 else None

    def log(self, dag_id: str, run_id: str, task_id: str, map_index: int, try_number: int) -> list[str]:
        """The lines of a task's log."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        content = self.get(path, map_index=map_index, full_content=True)["content"]
        return [line["event"] if isinstance(line, dict) else str(line) for line in content]

    def send(self, method: str, path: str, body: Any) -> Any:
        """The answer to ``POST`` or ``PATCH /api/v2<path>``.

        SQLite refuses a transaction that read what another has written since. Then nothing was done, and this
        asks again.
        """
        for _ in range(_TRIES):
            answer = self._client.request(method, path, json=body)
            if not answer.is_server_error:
                break
            time.sleep(0.5)
        return answer.raise_for_status().json()

    def clear(self, dag_id: str, run_id: str, task: Mapping[str, Any]) -> None:
        """Clear one task instance, one of :meth:`tasks`, whatever its state."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [[task["task_id"], task["map_index"]]],
            "only_failed": False,
        }
        self.send("POST", f"/dags/{dag_id}/clearTaskInstances", body)

    def get(self, path: str, **params: Any) -> Any:
        """The answer to ``GET /api/v2<path>``."""
        return self._client.get(path, params=params).raise_for_status().json()

    def delete(self, path: str) -> None:
        """``DELETE /api/v2<path>``."""
        self._client.delete(path).raise_for_status()
