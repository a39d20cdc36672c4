"""A real Airflow with users and sweeps, and a real browser to look at them, started once."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from synthetic import Sweep, utc_now

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.demo.demo_services import Services

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
expect.set_options(timeout=30_000)
#: Who may what: Airflow's simple auth manager gives a DAG of a team to those in it, and its admins.
USERS = {"ada": "admin", "victor": "viewer", "nobody": ""}
PASSWORD = "a-password-for-tests"


@dataclass
class Site:
    """The deployment as a visitor knows it.

    :param run_id: of the DAG ``watched_sweep``.
    """

    services: Services
    airflow: Airflow
    gate: Path
    run_id: str = ""

    @property
    def url(self) -> str:
        return self.services.airflow_url

    @property
    def database(self) -> str:
        return self.services.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]

    def client(self, user: str | None = None) -> httpx.Client:
        headers = {}
        if user is not None:
            body = {"username": user, "password": PASSWORD}
            answer = httpx.post(f"{self.url}/auth/token", json=body, timeout=60).raise_for_status()
            headers["Authorization"] = f"Bearer {answer.json()['access_token']}"
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)

    def wait(self, condition: Any, timeout: float = 1000.0) -> None:
        """Wait until ``condition`` holds of the states of the run's tasks, by their ids and names."""
        deadline = time.monotonic() + timeout
        while True:
            self.services.check()
            tasks = []
            with suppress(httpx.TimeoutException):  # a busy machine answers late
                tasks = self.airflow.tasks("watched_sweep", self.run_id)
            seen = {f"{t['task_id']} {t['rendered_map_index'] or ''}".strip(): t["state"] for t in tasks}
            if seen and condition(seen):
                return
            assert time.monotonic() < deadline, seen
            time.sleep(0.5)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """An Airflow in which two sweeps run, one of them to fail, and others stand in the database."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).parent / "dags", folder / "dags")
    shutil.copy(ROOT / "tests" / "airflow" / "dags" / "faulty.py", folder / "dags")
    passwords = folder / "passwords.json"
    passwords.write_text(json.dumps(dict.fromkeys(USERS, PASSWORD)))
    settings = {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(
            f"{name}:{role}" for name, role in USERS.items()
        ),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        "SATURN_TEST_GATE": str(folder / "gate"),
        # Servers there import what their jobs need, and nothing for the tests of ranks.
        "SATURN_WARM_IMPORTS": "",
    }
    services = Services(folder / "state", folder / "dags", settings)
    try:
        services.start(timeout=300)
        airflow = Airflow(services.airflow_url, ("ada", PASSWORD))
        site = Site(services, airflow, folder / "gate")
        large().write(site.database)
        secret().write(site.database)
        hostile().write(site.database)
        for night in nights():
            night.write(site.database)
        airflow.wait_for_dag("watched_sweep", timeout=180)
        site.run_id = airflow.trigger("watched_sweep")
        yield site
    finally:
        services.stop()


def large() -> Sweep:
    """200 jobs on 256 devices, in the middle."""
    names = [
        f"gpt2-lr{lr}-b{batch}-s{seed:02}"
        for lr in (1, 3, 10, 30)
        for batch in (16, 64)
        for seed in range(25)
    ]
    broken = {names[3]: "the loss is nan at step 41"}
    return Sweep("large", names, 32, 8, utc_now() - timedelta(seconds=1500), at=1500, broken=broken)


def nights() -> list[Sweep]:
    """Two nights of a DAG; in the second a job is new, and another is not planned."""
    names = ["gpt2-small", "gpt2-medium"]
    first = utc_now() - timedelta(days=2)
    return [
        Sweep("nights", names, 1, 2, first, run_id="night-1", champion=champion("1", 0.1)),
        Sweep(
            "nights",
            [*names, "gpt2-new"],
            1,
            2,
            first + timedelta(days=1),
            run_id="night-2",
            unplanned={"gpt2-huge": "it fits nowhere"},
            champion=champion("2", -0.05),
        ),
    ]


def champion(version: str, beaten_by: float) -> dict[str, Any]:
    """What a report says of the champion that it scored anew."""
    value = {"version": version, "metric": "eval_loss", "value": 0.5, "best": 0.5 - beaten_by}
    return {**value, "beaten_by": beaten_by}


#: What Airflow and Saturn let through as names, and pages and charts may take for something else.
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(2)>',
    "' onmouseover='alert(3)",
    "</script><script>alert(4)</script>",
    "=cmd|' /C calc'!A0",
    "{{7*7}} ${7*7} %s %00 &lt;b&gt;",
    "javascript:alert(5)",
    "../../etc/passwd?x#y",
    "__proto__",
    "constructor",
    "\u202egpj.exe\u202c",
    "a\u0300\u0301 \U0001f600 \u0000".rstrip("\u0000 "),
)


def hostile() -> Sweep:
    """Jobs, a run and an error with such names."""
    broken = {HOSTILE[0]: HOSTILE[3]}
    began = utc_now() - timedelta(days=3)
    return Sweep("hostile", HOSTILE, 1, 4, began, broken=broken, run_id="</title><script>alert(6)</script>")


def secret() -> Sweep:
    """A sweep of a team that none of the users is in."""
    return Sweep("secret", ["hidden-job"], 1, 4, utc_now() - timedelta(days=1), team="others")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Containers seldom allow what Chromium's own sandbox needs; it sees no page but ours.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


def chromium() -> str:
    """Debian's; Playwright never downloads one."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "the tests of the plan page need Chromium: sudo apt-get install chromium"
    return found


class Visitor:
    """Somebody who looks at pages: what they must never do is watched."""

    def __init__(self, browser: Browser, site: Site, user: str | None, **options: Any) -> None:
        self.site = site
        options = {"viewport": {"width": 1400, "height": 900}, **options}
        self.context = browser.new_context(base_url=site.url, **options)
        if user is not None:
            token = site.client(user).headers["Authorization"].removeprefix("Bearer ")
            self.context.add_cookies([{"name": "_token", "value": token, "url": site.url}])
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.context.on("request", lambda request: self._note(request.url))
        self.context.on("weberror", lambda error: self.errors.append(str(error.error)))
        self.context.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self.context.on("console", self._hear)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(120_000)

    def _note(self, url: str) -> None:
        if not url.startswith((self.site.url, "data:", "blob:")):
            self.outside.append(url)

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self, path: str) -> Page:
        """Open a plan page and wait until it is drawn."""
        self.page.goto(path)
        self.page.wait_for_selector("#content:not([hidden])")
        return self.page

    def shoot(self, name: str, full_page: bool = False) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=full_page)


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Any]:
    """Makes visitors. None of them asks another host for anything, meets an error, or sees a dialog."""
    visitors: list[Visitor] = []

    def make(user: str | None = "ada", **options: Any) -> Visitor:
        visitors.append(Visitor(browser, site, user, **options))
        return visitors[-1]

    yield make
    for visitor in visitors:
        visitor.context.close()
        assert visitor.outside == []
        assert visitor.errors == []
