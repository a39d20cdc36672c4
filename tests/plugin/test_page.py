"""The plan page as people meet it: in a browser, against a real Airflow."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import expect
from synthetic import RUN

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def running(site: Any) -> str:
    """The page of the steady sweep, while its gated job trains."""
    site.wait(
        lambda states: (
            states.get("steady.train gated") == "running"
            and states.get(f"steady.train {SCRIPT}") == "success"
        )
    )
    return f"/saturn/plan/watched_sweep/{site.run_id}"


@pytest.fixture(scope="module")
def failed(site: Any) -> str:
    """The page of the troubled sweep, after it failed."""
    site.wait(lambda states: states["troubled.report"] == "failed")
    return f"/saturn/plan/watched_sweep/{site.run_id}?sweep=troubled"


def row(page: Any, job: Any) -> Any:
    return page.locator("#table tbody tr", has=page.get_by_role("button", name=job, exact=True))


def places(page: Any, kind: Any) -> Any:
    """Where in the chart the bars of a kind are: the middle of each, in pixels."""
    return page.evaluate(
        """async (kind) => {
            const root = document.documentElement.dataset.root;
            const echarts = await import(`${root}/static/vendor/echarts-6.1.0.min.mjs`);
            const chart = echarts.getInstanceByDom(document.getElementById("chart"));
            const { data } = chart.getOption().series.find((one) => one.id === kind);
            return data.map(([start, end, row]) => chart.convertToPixel("grid", [(start + end) / 2, row]));
        }""",
        kind,
    )


def bars(page: Any, kind: Any) -> Any:
    """How many bars of a kind the chart has."""
    return len(places(page, kind))


def test_details_keep_the_focus_the_place_and_what_is_unfolded(running: Any, visit: Any) -> None:
    page = visit(viewport={"width": 1400, "height": 380}).open(running)
    row(page, "gated").get_by_role("button").click()
    details = page.locator("#details")
    expect(details.locator("h3").first).to_contain_text("Why single × 1")
    actual = details.locator("dt", has_text="actual").locator("+ dd")
    details.get_by_role("link", name="Airflow task").focus()
    kept = page.evaluate_handle(
        """() => {
            const details = document.getElementById("details");
            details.scrollTop = 60;
            return [document.activeElement, details.querySelector("tr.chosen"), details.scrollTop];
        }"""
    )
    before = actual.text_content()
    expect(actual).not_to_have_text(before)
    assert page.evaluate(
        """([focused, row, top]) => {
            const details = document.getElementById("details");
            return top === 60 && details.scrollTop === top
                && document.activeElement === focused && row.isConnected;
        }""",
        kept,
    )


def test_an_answer_that_comes_late_does_not_undo_a_newer_choice_of_sweep(running: Any, visit: Any) -> None:
    page = visit().open(running)
    held = []
    page.route(lambda url: "/data/plan/" in url and "sweep=" not in url, lambda route: held.append(route))
    page.wait_for_timeout(4000)  # the next question is under way, and gets no answer yet
    assert held
    page.locator("#sweep").select_option("troubled")
    expect(page.locator("#name")).to_have_text("troubled")
    with page.expect_response(lambda answer: "sweep=" not in answer.url):
        held[0].continue_()
    page.wait_for_timeout(300)
    assert page.locator("#name").text_content() == "troubled"  # now, not after the next answer
    # And only one series of questions goes on.
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(12_000)
    assert 1 <= len(asked) <= 4
    assert all(url.endswith("sweep=troubled") for url in asked)


def test_a_mistake_in_drawing_is_not_called_airflows_silence(running: Any, visit: Any) -> None:
    visitor = visit()
    page = visitor.open(running)
    message = page.locator("#message")
    plans = re.compile("/data/plan/")
    page.route(plans, lambda route: route.fulfill(status=502))
    expect(message).to_contain_text("No word from Airflow (Airflow answered with 502); trying again")

    def without_jobs(route: Any) -> None:
        anew = {k: v for k, v in route.request.headers.items() if k != "if-none-match"}
        route.fulfill(json={**route.fetch(headers=anew).json(), "jobs": None})

    page.unroute(plans)
    page.route(plans, without_jobs)
    expect(message).to_contain_text("This page can't show what Airflow answered")
    assert "TypeError" in visitor.errors[-1]
    page.unroute(plans)
    expect(message).to_be_hidden()
    expect(row(page, "gated")).to_be_visible()
    visitor.errors.clear()


def test_a_running_sweep_is_followed_until_it_has_ended(site: Any, running: Any, visit: Any) -> None:
    visitor = visit()
    page = visitor.open(running)
    expect(row(page, "gated").locator(".chip")).to_have_text("running")
    expect(page.locator("#live")).to_contain_text("live")
    expect(page.locator("#stages li").nth(3)).to_have_class("running")
    expect(row(page, SCRIPT).locator(".chip")).to_have_text("finished")
    # What the tasks told while they trained: how far the job is, and its curve.
    expect(row(page, "gated").locator(".trained")).to_contain_text("%", timeout=60_000)
    expect(row(page, "gated").locator("svg.spark path.main")).to_be_visible()
    expect(row(page, SCRIPT).locator("svg.spark")).to_be_visible()
    assert (bars(page, "planned"), bars(page, "actual")) == (2, 2)
    visitor.shoot("running")
    page.evaluate("window.here = true")
    site.gate.touch()
    expect(row(page, "gated").locator(".chip")).to_have_text("finished", timeout=120_000)
    expect(page.locator("#state")).to_have_text("success", timeout=60_000)
    expect(page.locator("#live")).to_have_text("")
    expect(page.locator("#totals")).to_contain_text("Best job")
    assert page.evaluate("window.here")
    visitor.shoot("finished")


def test_names_are_text_wherever_they_stand(running: Any, visit: Any) -> None:
    page = visit().open(running)
    row(page, SCRIPT).get_by_role("button").click()
    expect(page.locator("#details-title")).to_have_text(SCRIPT)
    page.get_by_label("Find").fill("alert(1)")
    expect(page.locator("#table tbody tr:not([hidden], .reasons)")).to_have_count(1)
    chart = page.locator("#chart")
    tip = page.locator(".tip strong")
    for x, y in places(page, "actual"):
        chart.hover(position={"x": x, "y": y})
        expect(tip).to_be_visible()
        if tip.text_content() == SCRIPT:
            page.get_by_label("Close the details").click()
            chart.click(position={"x": x, "y": y})
            expect(page.locator("#details-title")).to_have_text(SCRIPT)
            return
    raise AssertionError("no tooltip of that job")


def test_failed_and_unplanned_jobs_say_why(failed: Any, visit: Any) -> None:
    visitor = visit()
    page = visitor.open(failed)
    expect(page.locator("#state")).to_have_text("failed")
    for job, status, reason in (
        ("bad-sample", "failed", "sample 600 is damaged"),
        ("no-model", "not planned", "weights/latest.pt is not there"),
    ):
        expect(row(page, job).locator(".chip")).to_have_text(status)
        expect(row(page, job).locator("+ tr.reasons")).to_contain_text(reason)
    expect(page.locator("#totals")).to_contain_text("1 finished")
    row(page, "good").get_by_role("button").click()
    details = page.locator("#details")
    expect(details.locator("h3").first).to_contain_text("Why single × 1")
    expect(details.locator(".options tr.chosen")).to_contain_text("chosen")
    expect(details.locator(".options tr.chosen")).to_contain_text("exact")
    expect(details).to_contain_text("Its result next to one device: exact.")
    expect(details).to_contain_text("faulty:linear")
    visitor.shoot("failed", full_page=True)


def test_in_airflows_own_ui_with_its_links_and_its_theme(site: Any, failed: Any, visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    page.goto(f"/dags/watched_sweep/runs/{site.run_id}")
    page.locator("a[href$='/plugin/saturn-plan']").click()
    frame = page.frame_locator("iframe")
    expect(frame.locator("#name")).to_have_text("steady")
    frame.locator("#sweep").select_option("troubled")
    expect(frame.locator("#name")).to_have_text("troubled")
    root = frame.locator("html")
    expect(root).to_have_attribute("data-theme", "light")
    visitor.shoot("in-airflow-light")
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.goto(f"/dags/watched_sweep/runs/{site.run_id}/plugin/saturn-plan?sweep=troubled")
    expect(frame.locator("#name")).to_have_text("troubled")
    expect(root).to_have_attribute("data-theme", "dark")
    expect(frame.locator("#stages")).to_be_visible()
    visitor.shoot("in-airflow-dark")
    page.evaluate("document.documentElement.classList.replace('dark', 'light')")
    expect(root).to_have_attribute("data-theme", "light")

    with visitor.context.expect_page() as opened:
        frame.get_by_label("MLflow run of good", exact=True).click()
    assert opened.value.url.startswith(site.services.mlflow_url)
    opened.value.close()
    visitor.outside = [url for url in visitor.outside if not url.startswith(site.services.mlflow_url)]
    frame.get_by_label("Log of bad-sample").click()
    page.wait_for_url(re.compile(r"/tasks/troubled\.train/mapped/\d+$"))
    expect(page.get_by_text("sample 600 is damaged").first).to_be_visible()
    # Airflow's own page asks for what an older run may lack; that is no fault of the plan's.
    visitor.errors = [error for error in visitor.errors if "404" not in error]


def test_all_of_it_by_keyboard(failed: Any, visit: Any) -> None:
    page = visit().open(failed)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#jobs")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    heads = page.locator("#table thead th")
    expect(heads.first).to_have_attribute("aria-sort", "ascending")
    names = page.locator("#table tbody th button")
    assert names.all_text_contents() == sorted(names.all_text_contents())
    names.first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#details-title")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#details")).to_be_hidden()
    expect(names.first).to_be_focused()


def test_two_hundred_jobs_on_256_devices(visit: Any, site: Any) -> None:
    visitor = visit()
    page = visitor.open(f"/saturn/plan/large/{RUN}")
    rows = page.locator("#table tbody tr:not([hidden], .reasons)")
    expect(rows).to_have_count(200)
    assert bars(page, "planned") >= 200
    assert 100 < bars(page, "actual") < bars(page, "planned")
    visitor.shoot("large")
    page.get_by_label("Find").fill("failed")
    expect(rows).to_have_count(1)
    expect(page.locator("#count")).to_have_text("1 of 200")
    page.get_by_label("Find").fill("")
    page.get_by_label("Node").select_option("gpu-07")
    of_node = rows.count()
    assert 1 < of_node < 30
    expect(rows.first).to_contain_text("gpu-07")
    page.get_by_label("Node").select_option("")
    page.locator("#legend").get_by_role("button", name="fsdp").click()
    expect(page.locator("#legend").get_by_role("button", name="fsdp")).to_have_attribute(
        "aria-pressed", "false"
    )
    assert rows.filter(has_text="fsdp").count() == 0
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Later").click()
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    visitor.shoot("large-dark-zoomed")


def test_the_list_of_sweeps_leads_to_their_plans(site: Any, failed: Any, visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/saturn/sweeps")
    rows = page.locator("#sweeps tbody tr")
    expect(rows).to_have_count(7)
    expect(rows.filter(has_text="large")).to_contain_text("1 failed")
    expect(rows.filter(has_text="night-2")).to_contain_text("3/4")
    expect(rows.filter(has_text="night-2")).to_contain_text("1 not planned")
    expect(page.locator(".trend")).to_have_count(1)
    expect(page.locator(".trend circle")).to_have_count(6)
    expect(page.locator(".trend")).to_contain_text("better in 1 of 2 nights")
    visitor.shoot("sweeps")
    page.get_by_label("State").select_option("success")
    expect(rows.filter(has_text="large")).to_have_count(0)
    page.get_by_label("Find").fill("night-2")
    expect(rows).to_have_count(1)
    page.get_by_label("Find").fill("")
    for night in ("night-1", "night-2"):
        rows.filter(has_text=night).get_by_role("checkbox").check()
    page.get_by_role("link", name="Compare the two").click()
    expect(page.locator("#before")).to_have_value("night-1")
    expect(page.locator("#after")).to_have_value("night-2")
    jobs = page.locator("#table tbody tr")
    expect(jobs).to_have_count(4)
    expect(jobs.filter(has_text="gpt2-new")).to_contain_text("not in the sweep before")
    expect(jobs.filter(has_text="gpt2-medium").locator("svg path")).to_have_count(2)
    expect(jobs.filter(has_text="gpt2-medium").locator(".better, .worse").first).to_be_visible()
    expect(page.locator("#whole")).to_contain_text("Actual makespan")
    visitor.shoot("compare")
    page.get_by_label("Swap the two").click()
    expect(jobs.filter(has_text="gpt2-new")).to_contain_text("no longer there")
    page.goto("/saturn/sweeps/watched_sweep")
    expect(rows).to_have_count(2)
    page.get_by_role("link", name="watched_sweep · troubled").click()
    expect(page.locator("#state")).to_have_text("failed")


def test_a_narrow_window_holds_all(visit: Any, failed: Any) -> None:
    page = visit(viewport={"width": 620, "height": 900}).open(failed)
    row(page, "good").get_by_role("button").click()
    expect(page.locator("#details-title")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_plan_task_links_to_its_page(site: Any, failed: Any) -> None:
    path = f"/api/v2/dags/watched_sweep/dagRuns/{site.run_id}/taskInstances/troubled.plan/links"
    links = site.client("ada").get(path).json()["extra_links"]
    run = f"{site.url}/dags/watched_sweep/runs/{site.run_id}"
    assert links["Plan"] == f"{run}/plugin/saturn-plan?sweep=troubled"
    assert links["MLflow run"].startswith(site.services.mlflow_url)
