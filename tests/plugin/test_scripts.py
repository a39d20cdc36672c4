"""What the pages' scripts make of what the server says, in a browser, without an Airflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader
from playwright.sync_api import Browser, Page, Route, expect
from record import MADE, Run, finished, on

import saturn_airflow.plugin

pytestmark = pytest.mark.services
PLUGIN = Path(saturn_airflow.plugin.__file__).parent
TEMPLATES = Environment(loader=FileSystemLoader(PLUGIN / "templates"), autoescape=True)


class Server:
    """What a browser is told at each address."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.data: dict[str, Any] = {}
        page.route("**/*", self.answer)

    def answer(self, route: Route) -> None:
        address = route.request.url.removeprefix("http://airflow.test/saturn/")
        if address.startswith("static/"):
            route.fulfill(path=PLUGIN / address)
        elif address.startswith("data/"):
            query = address.partition("?")[2]
            found = next(value for part, value in self.data.items() if part in query or not part)
            route.fulfill(content_type="application/json", body=json.dumps(found))
        else:
            route.fulfill(content_type="text/html", body=self.html)

    def open(self, template: str, search: str = "", **values: str) -> Page:
        self.html = TEMPLATES.get_template(template).render(root="/saturn", airflow="", **values)
        self.page.goto(f"http://airflow.test/saturn/{search}")
        return self.page


@pytest.fixture
def server(browser: Browser) -> Iterator[Server]:
    with browser.new_context(locale="en-GB", timezone_id="Asia/Tokyo") as context:
        yield Server(context.new_page())


def listed(*runs: str) -> dict[str, Any]:
    usual = {"dag_id": "d", "sweep": "s", "state": "success", "is_comparable": True, "jobs": {"all": 0}}
    return {"sweeps": [{**usual, "run_id": run} for run in runs]}


def test_what_was_picked_may_leave_the_list(server: Server) -> None:
    server.data = {"": listed("new", "old")}
    page = server.open("sweeps.html")
    page.get_by_label("Compare d old").check()
    expect(page.locator("#compare")).to_be_visible()
    server.data = {"": listed("newest", "new")}
    page.locator("#limit").select_option("100")
    expect(page.locator("#sweeps tbody tr").first).to_contain_text("newest")
    expect(page.locator("#message")).to_be_hidden()
    expect(page.locator("#compare")).to_be_hidden()


def test_reasons_are_as_wide_as_the_table_and_stages_lead_to_logs(server: Server) -> None:
    run = Run("failed")
    run.plan(on("bad", 0, 50), on("good", 0, 50, [1]), start=5.0)
    reason = "its model is of another shape than the weights that it is to begin with, which are of last week"
    run.train(0, "failed", "bad", start=10.0, status="failed", reason=f"{reason}\nTraceback ...")
    run.train(1, "success", "good", start=10.0, **finished(1000, 1050))
    server.data = {"": {**run.page(), "curves": {}, "curves_at": None}}
    page = server.open("plan.html", dag_id="d", run_id="r")
    why = page.locator("#table tr.reasons", has_text=reason)
    expect(page.locator("#table tr", has_text="bad").locator("+ tr")).to_have_text(reason)
    widths = why.evaluate("row => [row.querySelector('p').offsetWidth, row.closest('table').offsetWidth]")
    assert widths[0] > 0.9 * widths[1]
    page.get_by_label("Find").fill("good")
    expect(why).to_be_hidden()
    plan, train = (page.locator("#stages").get_by_role("link", name=name) for name in ("plan", "train"))
    expect(plan).to_have_attribute("href", "/dags/d/runs/r/tasks/sweep.plan")
    expect(train).to_have_attribute("href", "/dags/d/runs/r/tasks/sweep.train/mapped/0")
    expect(page.locator("#stages a")).to_have_count(2)


def test_links_are_those_of_the_sweep_that_is_shown(server: Server) -> None:
    shown = {**Run("success").page(), "curves": {}, "curves_at": None}
    pages = {name: {**shown, "sweep": name, "sweeps": ["one", "two"]} for name in ("one", "two")}
    server.data = {"sweep=two": pages["two"], "": pages["one"]}
    page = server.open("plan.html", dag_id="d", run_id="r")
    compare = page.locator("#links").get_by_role("link", name="Compare")
    expect(compare).to_have_attribute("href", "/saturn/compare/d?sweep=one&after=r")
    page.locator("#sweep").select_option("two")
    expect(compare).to_have_attribute("href", "/saturn/compare/d?sweep=two&after=r")


def champion(beaten_by: float) -> dict[str, Any]:
    found = {"version": "3", "metric": "eval_loss", "value": 0.5, "best": 0.5 - beaten_by}
    return {**found, "beaten_by": beaten_by}


def test_by_how_much_the_champion_was_beaten(server: Server) -> None:
    night = {**Run("success").page(), "curves": {}, "curves_at": None, "champion": champion(0.05)}
    server.data = {"": night}
    card = server.open("plan.html", dag_id="d", run_id="r").locator("#totals div", has_text="champion")
    expect(card).to_have_text(
        "Beats the champion by0.0510.0 % better than version 3, which has eval loss 0.5 on this sweep's data"
    )
    server.data = {"": {**night, "champion": champion(-0.05)}}
    card = server.open("plan.html", dag_id="d", run_id="r").locator("#totals div", has_text="champion")
    expect(card).to_contain_text("Behind the champion by0.0510.0 % worse than version 3")
    nights = listed("late", "early")
    for sweep, by in zip(nights["sweeps"], (-0.05, 0.1), strict=True):
        best = {"job": "a", "metric": "eval_loss", "value": 0.5 - by}
        sweep |= {"best": best, "champion": champion(by), "actual_seconds": 9.0}
    server.data = {"": nights}
    trend = server.open("sweeps.html").locator(".trend")
    expect(trend).to_contain_text("over the champion−0.05better in 1 of 2 nights")
    expect(trend.locator("circle")).to_have_count(6)
    expect(trend.locator("line.base")).to_have_count(1)


def test_by_when_a_running_sweep_is_done_with_which_odds(server: Server) -> None:
    run = Run("running")
    run.plan(on("job", 0, 50))
    run.train(0, "running", "job")
    promise = {"confidence": 0.9, "seconds": 200.0, "odds": 0.97}
    for told, words in (
        (promise, "Done with 90 % by3 m 20 sat 09:20:00the deadline is kept with 97 %"),
        ({**promise, "odds": None}, "Done with 90 % by3 m 20 sat 09:20:00"),
        ({"confidence": 0.9, "why": "0 errors are too few"}, "Done bynot promised yet0 errors are too few"),
    ):
        run.values["sweep.plan", -1, "plan"]["promise"] = told
        server.data = {"": {**run.page(), "origin": MADE, "curves": {}, "curves_at": None}}
        card = server.open("plan.html", dag_id="d", run_id="r").locator("#totals div", has_text="Done ")
        expect(card).to_have_text(words)


def test_what_made_no_plan_leads_to_the_log_that_says_why(server: Server) -> None:
    run = Run("failed")
    for stage in ("trials", "plan", "report"):
        run.task(stage, stage, "failed")
    server.data = {"": {**run.page(100.0), "curves": {}, "curves_at": None}}
    message = server.open("plan.html", dag_id="d", run_id="r").locator("#message")
    expect(message).to_have_text("No plan was made; the log of trials says why.")


def test_what_waits_for_its_report_plans_no_further_round(server: Server) -> None:
    run = Run("running")
    run.plan(on("job", 0, 50))
    run.values["sweep.plan", -1, "plan"]["promise"] = {"confidence": 0.9, "why": "0 errors are too few"}
    run.train(0, "success", "job", **finished(MADE, MADE + 50))
    run.task("report", "report", "running")
    server.data = {"": {**run.page(100.0), "curves": {}, "curves_at": None}}
    totals = server.open("plan.html", dag_id="d", run_id="r").locator("#totals")
    card = totals.locator("div", has_text="ended")
    expect(card).to_have_text("So far50 sall jobs have ended09:16:40 – 09:17:30")
    expect(totals).not_to_contain_text("not promised yet")


def test_only_a_sweep_that_did_all_it_was_to_is_compared_with_its_plan(server: Server) -> None:
    usual = {"all": 2, "failed": 0, "not_planned": 0}
    took = {"actual_seconds": 3242.0, "makespan": 100.0}
    nights = listed("whole", "failed")
    nights["sweeps"][0] |= {**took, "jobs": {**usual, "finished": 2}}
    nights["sweeps"][1] |= {**took, "jobs": {**usual, "finished": 1, "failed": 1}}
    server.data = {"": nights}
    rows = server.open("sweeps.html").locator("#sweeps tbody tr")
    expect(rows.filter(has_text="whole")).to_contain_text("+3142 %")
    expect(rows.filter(has_text="failed")).not_to_contain_text("+3142 %")
    for status, told in (("finished", "54 m 02 s+3142 % against the plan"), ("failed", "54 m 02 s")):
        run = Run("running")
        run.plan(on("one", 0, 50), on("two", 50, 100))
        run.train(0, "success", "one", **finished(MADE, MADE + 50))
        ended = "success" if status == "finished" else "failed"
        run.train(1, ended, "two", **{**finished(MADE + 50, MADE + 3242), "status": status})
        run.task("report", "report", ended, return_value={"jobs": []})
        run.state = ended
        server.data = {"": {**run.page(5000.0), "curves": {}, "curves_at": None}}
        card = server.open("plan.html", dag_id="d", run_id="r").locator("#totals div", has_text="Actual")
        expect(card).to_have_text(f"Actual makespan{told}09:16:40 – 10:10:42")


def test_a_sweep_that_is_not_in_the_list_is_not_replaced_without_a_word(server: Server) -> None:
    night = {**Run("success").page(), "curves": {}, "curves_at": None}
    server.data = {"limit=": listed("new", "old"), "": night}
    page = server.open("compare.html", dag_id="d", search="?sweep=s&before=gone&after=new")
    expect(page.locator("#message")).to_have_text(
        "Not among the latest 200 sweeps of this DAG: gone. Shown instead are those chosen above."
    )
    expect(page.locator("#before")).to_have_value("old")
    page = server.open("compare.html", dag_id="d", search="?sweep=s&before=old&after=new")
    expect(page.locator("#content")).to_be_visible()
    expect(page.locator("#message")).to_be_hidden()


def test_a_curves_legend_says_what_the_job_s_details_say(server: Server) -> None:
    """The points are means over some steps, and a job's details have the last value."""
    server.data = {"": listed("new")}
    page = server.open("sweeps.html")
    shown = page.evaluate(
        """async () => {
          const { curveCharts } = await import("/saturn/static/curve.js");
          const curves = { loss: [[8, 3], [16, 2.5]], accuracy: [[8, 0.1], [16, 0.25]] };
          const charts = curveCharts(curves, { loss: 2.125 });
          return charts.map((chart) => chart.querySelector("strong").textContent);
        }"""
    )
    assert shown == ["2.125", "0.25"]


@pytest.mark.parametrize(("count", "levels"), [(3, 3), (48, 44)])
def test_only_a_curve_of_many_points_has_its_beginning_cut_off(
    server: Server, count: int, levels: int
) -> None:
    server.data = {"": listed()}
    drawn = server.open("sweeps.html").evaluate(
        """async (count) => {
            const { sparklineOfTwo } = await import("/saturn/static/curve.js");
            const points = Array.from({ length: count }, (_, index) => [10 * (index + 1), 5 - 0.05 * index]);
            const curves = { eval_loss: points };
            const path = sparklineOfTwo(curves, curves, "eval_loss").querySelector("path");
            return [...path.getAttribute("d").matchAll(/ ([\\d.-]+)/g)].map(([, y]) => y);
        }""",
        count,
    )
    assert (len(drawn), len(set(drawn))) == (count, levels)


@pytest.mark.parametrize("values", [[0.2, 0.7, 0.8], [0.8, 0.3, 0.2], [5.0, 5.0, 5.0], [9.0, 0.3, 0.5]])
def test_a_curve_stays_in_its_row(server: Server, values: list[float]) -> None:
    server.data = {"": listed()}
    page = server.open("sweeps.html")
    inside = page.evaluate(
        """async (values) => {
            const { sparkline } = await import("/saturn/static/curve.js");
            const points = values.map((value, index) => [38 * (index + 1), value]);
            const picture = sparkline({ loss: [[1, 1], [100, 0.5]], accuracy: points }, "accuracy");
            const heights = [...picture.querySelector("path").getAttribute("d").matchAll(/ ([\\d.-]+)/g)];
            const height = Number(picture.getAttribute("height"));
            return heights.every(([, y]) => Number(y) >= 0 && Number(y) <= height);
        }""",
        values,
    )
    assert inside
