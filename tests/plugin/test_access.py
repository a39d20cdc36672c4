"""Who sees what of sweeps: nothing without a login, nothing of a DAG that one may not read."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

import pytest
from playwright.sync_api import expect
from synthetic import RUN

from saturn_airflow.plugin import SaturnPlugin
from saturn_airflow.plugin.changes import mark
from saturn_airflow.plugin.latest_sweeps import read_sweeps
from saturn_airflow.plugin.links import PREFIX
from saturn_airflow.plugin.queries import read_run

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
LARGE = f"/saturn/plan/large/{RUN}"
PAGE = {"Accept": "text/html,*/*"}


def routes() -> Any:
    (mounted,) = SaturnPlugin().fastapi_apps
    return [route.path for route in mounted["app"].routes]


def fill(route: Any, dag_id: Any) -> Any:
    path = route.replace("{dag_id}", dag_id).replace("{run_id:path}", RUN).replace("{path:path}", "plan.js")
    return f"{PREFIX}{path}" + ("?sweep=sweep&job=hidden-job" if route.startswith("/data/") else "")


@pytest.mark.parametrize("route", routes())
def test_no_route_answers_without_a_login(site: Any, route: Any) -> None:
    answer = site.client().get(fill(route, "large"))
    assert answer.status_code == 401, route
    assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize("route", [route for route in routes() if not route.startswith("/static")])
def test_no_route_answers_without_a_role(site: Any, route: Any) -> None:
    assert site.client("nobody").get(fill(route, "large")).status_code == 403, route


@pytest.mark.parametrize("route", [route for route in routes() if "{dag_id}" in route])
def test_a_dag_of_others_shows_nothing(site: Any, route: Any) -> None:
    assert site.client("victor").get(fill(route, "secret")).status_code == 403, route
    assert site.client("ada").get(fill(route, "secret")).status_code == 200, route


def test_the_list_holds_what_one_may_read(site: Any) -> None:
    seen = {
        user: {sweep["dag_id"] for sweep in site.client(user).get("/saturn/data/sweeps").json()["sweeps"]}
        for user in ("ada", "victor")
    }
    assert "secret" in seen["ada"]
    assert "large" in seen["victor"]
    assert "secret" not in seen["victor"]


def test_a_person_is_told_in_words(site: Any) -> None:
    answer = site.client("victor").get(f"/saturn/plan/secret/{RUN}", headers=PAGE)
    assert answer.status_code == 403
    assert "You may not see the sweeps of this DAG." in answer.text
    assert "hidden-job" not in answer.text
    answer = site.client("victor").get("/saturn/data/plan/large/no-such-run")
    assert (answer.status_code, answer.json()["detail"]) == (404, "There is no such DAG run")


def test_no_login_is_sent_to_it_and_comes_back(site: Any, visit: Any) -> None:
    visitor = visit(user=None)
    page = visitor.page
    page.goto(LARGE)
    page.wait_for_url(re.compile("/auth/login"))
    page.get_by_label("Username").fill("victor")
    page.locator("input[type=password]").fill("a-password-for-tests")
    page.get_by_role("button", name=re.compile("sign in", re.IGNORECASE)).click()
    page.wait_for_url(f"**{LARGE}")
    expect(page.locator("#count")).to_have_text("200")
    visitor.errors = [error for error in visitor.errors if "401" not in error]


def test_a_page_says_when_the_login_has_ended(site: Any, visit: Any) -> None:
    visitor = visit()
    page = visitor.open(LARGE)
    visitor.context.clear_cookies()
    expect(page.locator("#message")).to_contain_text("Your login has ended", timeout=20_000)
    visitor.errors = [error for error in visitor.errors if "401" not in error]


def test_queries_do_not_grow_with_the_jobs(site: Any) -> None:
    from airflow.api_fastapi.core_api.security import PermittedDagRunFilter
    from sqlalchemy import create_engine, event
    from sqlalchemy.orm import Session

    engine = create_engine(site.database)
    said: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    counts = []
    with Session(engine) as session:
        for dag_id in ("large", "secret"):
            said.clear()
            assert read_run(session, dag_id, RUN) is not None
            counts.append(len(said))
        assert counts == [5, 5]
        said.clear()
        assert mark(session, "large", RUN, 0.0)
        assert len(said) == 3
        for dag_ids in ({"large", "secret"}, {"secret"}):
            said.clear()
            assert len(read_sweeps(session, PermittedDagRunFilter(dag_ids))) == len(dag_ids)
            assert len(said) == 4
        assert read_sweeps(session, PermittedDagRunFilter(set())) == []
    engine.dispose()


def test_a_page_that_knows_all_is_told_so_and_only_of_new_curves(site: Any) -> None:
    from airflow.models.xcom import XComModel
    from sqlalchemy import create_engine, update
    from sqlalchemy.orm import Session

    client, path = site.client("ada"), f"/saturn/data/plan/secret/{RUN}"
    first = client.get(path)
    known = {"If-None-Match": first.headers["ETag"]}
    at = first.json()["curves_at"]
    assert list(first.json()["curves"]) == ["hidden-job"]
    assert first.json()["curves"]["hidden-job"]["loss"]
    again = client.get(path, headers=known, params={"since": at})
    assert (again.status_code, again.content) == (304, b"")
    assert site.client("victor").get(path, headers=known).status_code == 403
    assert client.get(path, params={"since": at + 60}).json()["curves"] == {}

    engine = create_engine(site.database)
    with Session(engine) as session:
        later = datetime.fromtimestamp(at + 100, tz=timezone.utc)
        session.execute(update(XComModel).where(XComModel.dag_id == "secret").values(timestamp=later))
        session.commit()
    engine.dispose()
    news = client.get(path, headers=known, params={"since": at + 60})
    assert (news.status_code, list(news.json()["curves"])) == (200, ["hidden-job"])

    with Session(engine) as session:  # a plan that was made anew, of which no task has told anything
        of_plan = (
            XComModel.dag_id == "secret",
            XComModel.task_id == "sweep.plan",
            XComModel.key == "attempt",
        )
        assert session.execute(update(XComModel).where(*of_plan).values(value=at + 200)).rowcount == 1  # type: ignore[attr-defined]
        session.commit()
    engine.dispose()
    anew = client.get(path, params={"since": at + 60}).json()
    assert (anew["curves"], anew["curves_whole"]) == ({}, True)


def test_what_is_known_of_a_job_is_asked_for_by_name(site: Any) -> None:
    client = site.client("ada")
    path = f"/saturn/data/job/large/{RUN}"
    found = client.get(path, params={"sweep": "sweep", "job": "gpt2-lr1-b16-s00"}).json()
    assert found["rounds"][0]["choice"]["options"]
    assert client.get(path, params={"sweep": "sweep", "job": "other"}).status_code == 404
    assert client.get(path, params={"sweep": "other", "job": "gpt2-lr1-b16-s00"}).status_code == 404
