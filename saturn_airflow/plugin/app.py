"""The routes of the plan page, all of them behind Airflow's login and its permissions for the DAG.

Pages are HTML shells; what they show they fetch as JSON, drawn by the scripts in ``static/``. Nothing comes
from another host, and no script stands in a page: the content security policy forbids both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlencode

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.templating import Jinja2Templates
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.staticfiles import StaticFiles

from saturn_airflow.operators.context import home
from saturn_airflow.plugin import changes
from saturn_airflow.plugin.choice import job_choice
from saturn_airflow.plugin.cluster_page import cluster_page
from saturn_airflow.plugin.latest_sweeps import read_sweeps
from saturn_airflow.plugin.links import PREFIX
from saturn_airflow.plugin.listing import listed
from saturn_airflow.plugin.overview import sweep_page
from saturn_airflow.plugin.queries import DETAILS, PLAN, Record, ended_runs, read_run
from saturn_airflow.plugin.web_internals import (
    DagAccessEntity,
    GetUserDep,
    PermittedDagRunFilter,
    SessionDep,
    get_auth_manager,
    get_user,
    requires_access_dag,
)

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
#: Bytes of an answer at most; a sweep of 500 jobs takes half a MiB.
LARGEST = 32 * 2**20
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    # Browsers ask again each time; for the scripts, the answer is most often "not modified".
    "Cache-Control": "no-cache",
}

app = FastAPI(title="Saturn", openapi_url=None)
templates = Jinja2Templates(HERE / "templates")
files = StaticFiles(directory=HERE / "static")


def readable_dags(user: GetUserDep) -> set[str]:
    """The ids of the DAGs the user may read."""
    return set(get_auth_manager().get_authorized_dag_ids(user=user, method="GET"))


ReadableDags = Annotated[set[str], Depends(readable_dags)]


def readable_runs(readable: ReadableDags) -> PermittedDagRunFilter:
    """The runs of the DAGs the user may read."""
    return PermittedDagRunFilter(readable)


ReadableRuns = Annotated[PermittedDagRunFilter, Depends(readable_runs)]
Limit = Annotated[int, Query(ge=1, le=200)]
#: The page shows what Airflow shows as DAG runs, task instances and XComs: it takes the right to see all.
may_read_sweeps = [
    Depends(requires_access_dag("GET", entity))
    for entity in (DagAccessEntity.RUN, DagAccessEntity.TASK_INSTANCE, DagAccessEntity.XCOM)
]


@app.get("/sweeps", dependencies=may_read_sweeps)
def sweeps_page(request: Request) -> HTMLResponse:
    """The page of the latest sweeps."""
    return page(request, "sweeps.html")


@app.get("/sweeps/{dag_id}", dependencies=may_read_sweeps)
def dag_sweeps_page(request: Request, dag_id: str) -> HTMLResponse:
    """The page of a DAG's sweeps."""
    return page(request, "sweeps.html", dag_id=dag_id)


@app.get("/plan/{dag_id}/{run_id:path}", dependencies=may_read_sweeps)
def plan_page(request: Request, dag_id: str, run_id: str) -> HTMLResponse:
    """The page of the sweeps of one DAG run."""
    return page(request, "plan.html", dag_id=dag_id, run_id=run_id)


@app.get("/compare/{dag_id}", dependencies=may_read_sweeps)
def compare_page(request: Request, dag_id: str) -> HTMLResponse:
    """The page that compares two sweeps of a DAG."""
    return page(request, "compare.html", dag_id=dag_id)


@app.get("/cluster", dependencies=may_read_sweeps)
def cluster_of_all(request: Request) -> HTMLResponse:
    """The page of the cluster."""
    return page(request, "cluster.html")


@app.get("/data/cluster", dependencies=may_read_sweeps)
def cluster(request: Request, session: SessionDep, readable: ReadableDags) -> Response:
    """The nodes, and the active sweeps on them; of DAGs the user may not read, no names."""
    shown = cluster_page(home(), time.time(), readable, lambda runs: ended_runs(session, runs))
    return unless_known(request, shown)


@app.get("/data/sweeps", dependencies=may_read_sweeps)
def sweeps(request: Request, session: SessionDep, readable: ReadableRuns, limit: Limit = 50) -> Response:
    """The latest sweeps the user may see."""
    return unless_known(request, {"sweeps": listed(read_sweeps(session, readable, limit=limit))})


@app.get("/data/sweeps/{dag_id}", dependencies=may_read_sweeps)
def dag_sweeps(
    request: Request, session: SessionDep, readable: ReadableRuns, dag_id: str, limit: Limit = 50
) -> Response:
    """A DAG's latest sweeps."""
    return unless_known(request, {"sweeps": listed(read_sweeps(session, readable, dag_id, limit))})


@app.get("/data/plan/{dag_id}/{run_id:path}", dependencies=may_read_sweeps)
def plan(
    request: Request,
    session: SessionDep,
    dag_id: str,
    run_id: str,
    sweep: str | None = None,
    since: float | None = None,
) -> Response:
    """All the page shows of a sweep; without ``sweep``, of the run's first.

    :param since: the answer has the curves that were told of after it, in seconds since the epoch; all of
        them (``curves_whole``) where a plan was made since.
    """
    now = time.time()
    # Before all else: what changes while this reads counts as news for the next question.
    tag = changes.etag(changes.mark(session, dag_id, run_id, now), sweep)
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    record, group = _sweep_of(read_run(session, dag_id, run_id), sweep)
    plans = {made_at for _, made_at in record.all_values(record.of(group, PLAN), "attempt")}
    whole = since is None or any(made_at > since for made_at in plans)
    curves, at = changes.curves(session, dag_id, run_id, group, None if whole else since, plans)
    with in_words():
        shown = {**sweep_page(record, group, now), "curves": curves, "curves_at": at, "curves_whole": whole}
        return answer(shown, {"ETag": tag})


@app.get("/data/job/{dag_id}/{run_id:path}", dependencies=may_read_sweeps)
def job(session: SessionDep, dag_id: str, run_id: str, sweep: str, job: str) -> Response:
    """The estimates behind one job's strategy."""
    record = read_run(session, dag_id, run_id, DETAILS)
    with in_words():
        choice = job_choice(*_sweep_of(record, sweep), job)
        if choice is None:
            raise HTTPException(404, f"The sweep has no job {job!r}")
        return answer(choice)


@app.get("/static/{path:path}", dependencies=[Depends(get_user)])
async def static(request: Request, path: str) -> Response:
    """Scripts and styles."""
    return await files.get_response(path, request.scope)


@app.exception_handler(StarletteHTTPException)
async def refuse(request: Request, error: StarletteHTTPException) -> Response:
    """Send a person without a login to it, and say anything else in words; a script gets JSON."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"detail": error.detail}, error.status_code)
    if error.status_code == 401:
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{_airflow(request)}/api/v2/auth/login?{urlencode({'next': here})}", 302)
    messages = {403: "You may not see the sweeps of this DAG.", 404: "There is nothing here."}
    message = messages.get(error.status_code, str(error.detail))
    return page(request, "refused.html", error.status_code, message=message)


@app.middleware("http")
async def harden(request: Request, call_next: Any) -> Response:
    """Send the security headers with every answer; no name has a NUL, which databases fail at."""
    response: Response
    if "\0" in unquote(str(request.url)):
        response = JSONResponse({"detail": "No name has a NUL"}, 400)
    else:
        response = await call_next(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def unless_known(request: Request, content: dict[str, Any]) -> Response:
    """The answer; status 304 (not modified) alone where the browser has it already."""
    tag = changes.etag(content)
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return answer(content, {"ETag": tag})


def answer(content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """``content`` as JSON.

    :raises HTTPException: 413 where it is more than a browser or the server should hold.
    """
    response = JSONResponse(content, headers=headers)
    if len(response.body) > LARGEST:
        size = len(response.body) / 2**20
        raise HTTPException(413, f"This is {size:.0f} MiB, and the page shows {LARGEST / 2**20:.0f} at most")
    return response


def page(request: Request, name: str, status: int = 200, **values: str) -> HTMLResponse:
    """A page whose scripts know where they are from attributes of its root element."""
    context = {"root": request.scope["root_path"], "airflow": _airflow(request), **values}
    return templates.TemplateResponse(request, name, context, status)


def _airflow(request: Request) -> str:
    """The path Airflow is served under, without a slash at its end."""
    root: str = request.scope["root_path"]
    return root.removesuffix(PREFIX)


@contextmanager
def in_words() -> Iterator[None]:
    """Answer 404 in words where XComs can't be shown: who may edit them may have made anything of them.

    :raises HTTPException: 404 in place of any error; one that is raised within goes through.
    """
    try:
        yield
    except HTTPException:
        raise
    except Exception:
        log.exception("a sweep can't be shown")
        message = "What the tasks of this sweep pushed can't be shown; the API server's log says why"
        raise HTTPException(404, message) from None


def _sweep_of(record: Record | None, sweep: str | None) -> tuple[Record, str]:
    """The record and the task group of ``sweep``, or of the first one without; 404 where there is none."""
    if record is None:
        raise HTTPException(404, "There is no such DAG run")
    if not record.groups:
        raise HTTPException(404, "This DAG run has no sweep")
    if sweep is not None and sweep not in record.groups:
        raise HTTPException(404, f"This DAG run has no sweep {sweep!r}")
    return record, sweep or record.groups[0]
