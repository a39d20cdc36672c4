"""Every route and verb of the plugin, found by itself, for visitors who lack a login or one right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from airflow import settings
from airflow.api_fastapi.app import create_auth_manager
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.models import import_all_models
from airflow.models.base import Base
from fastapi import HTTPException
from fastapi.testclient import TestClient
from starlette.routing import Route

from saturn_airflow.plugin import SaturnPlugin
from saturn_airflow.plugin import app as plugin
from saturn_airflow.plugin.web_internals import DagAccessEntity

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
RIGHTS = (DagAccessEntity.RUN, DagAccessEntity.TASK_INSTANCE, DagAccessEntity.XCOM)
#: What needs a login and no right: scripts and styles, which tell nothing of anybody's sweeps.
FOR_ALL_WHO_ARE_IN = {"/static/{path:path}"}


class OneRightLess(SimpleAuthManager):
    """Airflow's simple auth manager, which has roles alone: here a role lacks the right that it is called."""

    def is_authorized_dag(
        self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None
    ) -> Any:
        return access_entity is None or user.role != access_entity.name


@pytest.fixture(scope="module")
def manager() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__CORE__AUTH_MANAGER", f"{__name__}.OneRightLess")
        patch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "of-tests-" * 8)
        import_all_models()  # type: ignore[no-untyped-call]
        Base.metadata.create_all(settings.engine)
        manager = create_auth_manager()
        manager.init()
        yield manager


def client_of(manager: Any, role: Any) -> Any:
    headers = {}
    if role is not None:
        token = manager.generate_jwt(SimpleAuthManagerUser(username="ann", role=role))
        headers = {"Authorization": f"Bearer {token}"}
    return TestClient(plugin.app, headers=headers, follow_redirects=False)


def routes() -> Any:
    found = [route.path for route in plugin.app.routes]  # type: ignore[attr-defined]
    assert all(isinstance(route, Route) for route in plugin.app.routes), "a mount would hide its routes"
    assert len(found) >= 9
    return found


def test_there_is_no_other_app() -> None:
    """Whatever else a plugin can serve would not be among the routes above."""
    made = SaturnPlugin()
    assert [entry["app"] for entry in made.fastapi_apps] == [plugin.app]
    served = ("fastapi_root_middlewares", "flask_blueprints", "appbuilder_views", "react_apps")
    assert not any(getattr(made, name, None) for name in served)


def filled(path: Any) -> str:
    url = path.replace("{dag_id}", "a-dag").replace("{run_id:path}", "a-run")
    url = url.replace("{path:path}", "plan.js")
    assert "{" not in url, "a parameter that this test does not know"
    return f"{url}?sweep=sweep&job=a-job"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("path", routes())
def test_without_a_login(manager: Any, path: Any, verb: Any) -> None:
    answer = client_of(manager, None).request(verb, filled(path))
    assert answer.status_code == (401 if verb == "GET" else 405)
    assert "Content-Security-Policy" in answer.headers
    if verb == "GET":
        forged = client_of(manager, None).get(filled(path), headers={"Authorization": "Bearer x.y.z"})
        assert forged.status_code == 403


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: right.name)
@pytest.mark.parametrize("path", sorted(set(routes()) - FOR_ALL_WHO_ARE_IN))
def test_without_one_right(manager: Any, path: Any, right: Any, verb: Any) -> None:
    answer = client_of(manager, right.name).request(verb, filled(path))
    assert answer.status_code == (403 if verb == "GET" else 405)
    assert "a-job" not in answer.text


def test_with_all_rights_the_pages_are_there(manager: Any) -> None:
    client = client_of(manager, "all")
    assert client.get("/sweeps").status_code == 200
    assert client.get("/static/plan.js").status_code == 200
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404


ODD = ("%00", "..%2f..%2fetc%2fpasswd", "a" * 5000, "%ff%fe", "%0d%0aSet-Cookie:x=1", "-rf", "%3Cb%3E")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(set(routes()) - FOR_ALL_WHO_ARE_IN))
def test_odd_questions_are_answered(manager: Any, path: Any) -> None:
    """Half characters, numbers that are none, long names: each is answered, none fails the server."""
    client = client_of(manager, "all")
    for odd in (
        "%00",
        "..%2f..%2fetc%2fpasswd",
        "a" * 5000,
        "%ff%fe",
        "%0d%0aSet-Cookie:x=1",
        "-rf",
        "%3Cb%3E",
    ):
        url = path.replace("{dag_id}", odd).replace("{run_id:path}", odd)
        for query in (
            f"sweep={odd}&job={odd}",
            "since=nan&sweep=a&job=a",
            "since=-1e400&limit=1e9&sweep=a&job=a",
        ):
            answer = client.get(f"{url}?{query}")
            assert answer.status_code in (200, 400, 404, 422), (url, query, answer.text)
            assert "set-cookie" not in answer.headers
            assert "<b>" not in answer.text
            if "%00" in f"{url}?{query}":
                assert answer.status_code == 400
                assert "Content-Security-Policy" in answer.headers


def test_an_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"jobs": ["a"] * 10}
    assert plugin.answer(small, {"ETag": "x"}).status_code == 200
    monkeypatch.setattr(plugin, "LARGEST", 20)
    with pytest.raises(HTTPException, match="the page shows 0 at most") as refused:
        plugin.answer(small)
    assert refused.value.status_code == 413
