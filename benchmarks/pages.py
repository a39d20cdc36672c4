"""What the plan page costs the API server, and how soon it is drawn.

`python benchmarks/pages.py [--out FILE]`

Starts a real API server on a new SQLite database with a made-up sweep that is in the middle: 500 jobs on 64
devices, each job with its curves. Prints medians in milliseconds of the answers to a page's questions, beside
what Airflow's own pages ask for the same DAG run, what CPU time they cost the server, and how long Chromium
takes from the answer to the drawn page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
from machine import describe

ROOT = Path(__file__).parents[1]
DRAWN = """
window.drawn = new Promise((resolve) => {
  const look = () => {
    const rows = document.querySelectorAll("#table tbody tr:not(.reasons)").length;
    const asked = performance.getEntriesByType("resource");
    const answer = asked.find((entry) => entry.name.includes("/data/plan/"));
    if (rows >= JOBS && answer && document.querySelector("#chart canvas")) {
      requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - answer.responseEnd)));
    } else requestAnimationFrame(look);
  };
  addEventListener("DOMContentLoaded", look);
});
"""


def settings(home: str, port: int) -> dict[str, str]:
    """The environment of an Airflow of its own."""
    own = {
        "AIRFLOW_HOME": home,
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{port}",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
    }
    return {**os.environ, **own}


def write(jobs: int) -> None:
    """Write the sweep down; in a process whose environment says where."""
    sys.path.insert(0, str(ROOT / "tests" / "plugin"))
    from synthetic import Sweep, utc_now

    names = [f"job-{index:03}" for index in range(jobs)]
    began = utc_now() - timedelta(seconds=20_000)
    url = os.environ["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
    Sweep("sweep_of_many", names, 8, 8, began, at=20_000).write(url)


@contextmanager
def served(home: str, jobs: int) -> Iterator[tuple[str, psutil.Process]]:
    """The address of an API server with the sweep, and its process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = settings(home, port)
    airflow = str(Path(sys.executable).parent / "airflow")
    subprocess.run([airflow, "db", "migrate"], env=env, check=True, capture_output=True)
    subprocess.run([sys.executable, __file__, "--write", str(jobs)], env=env, check=True)
    command = [airflow, "api-server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                httpx.get(f"{url}/api/v2/version", timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


def cpu_seconds(server: psutil.Process) -> float:
    """What the server and its workers have taken of the cores."""
    return sum(sum(one.cpu_times()[:2]) for one in [server, *server.children(recursive=True)])


def milliseconds(ask: Callable[[], httpx.Response], repeats: int) -> tuple[float, httpx.Response]:
    """The median time of an answer, and the last one."""
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        answer = ask()
        took.append(1000 * (time.perf_counter() - began))
        answer.raise_for_status() if answer.status_code != 304 else None
    return round(statistics.median(took), 1), answer


def drawn(url: str, token: str, path: str, jobs: int, repeats: int) -> float | None:
    """Median milliseconds from the answer to the drawn page; None without Chromium."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1600, "height": 1000})
        context.add_cookies([{"name": "_token", "value": token, "url": url}])
        context.add_init_script(DRAWN.replace("JOBS", str(jobs)))
        took: list[float] = []
        for _ in range(repeats):
            page = context.new_page()
            page.goto(url + path)
            took.append(page.evaluate("window.drawn"))
            page.close()
        browser.close()
    return round(statistics.median(took), 1)


def measure(jobs: int, repeats: int) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as home, served(home, jobs) as (url, server):
        token = httpx.get(f"{url}/auth/token", timeout=60).json()["access_token"]
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=120)
        run = "manual__2026-11-20T22-00-00"
        path = f"/saturn/data/plan/sweep_of_many/{run}"
        _, first = milliseconds(lambda: client.get(path), 3)
        whole, first = milliseconds(lambda: client.get(path), repeats)
        since = {"since": first.json()["curves_at"] + 60}
        before = cpu_seconds(server)
        news, changed = milliseconds(lambda: client.get(path, params=since), repeats)
        news_cpu = 1000 * (cpu_seconds(server) - before) / repeats

        def again() -> httpx.Response:
            # Every half minute all is told anew; what is measured is the time between.
            answer = client.get(path, params=since, headers={"If-None-Match": tag[0]})
            tag[0] = answer.headers["ETag"]
            return answer

        tag = [changed.headers["ETag"]]
        known, last = milliseconds(again, repeats)
        listed, _ = milliseconds(lambda: client.get("/saturn/data/sweeps"), repeats)
        airflow = "/api/v2/dags/~/dagRuns/~/taskInstances"
        own, _ = milliseconds(lambda: client.get(airflow, params={"limit": 100}), repeats)
        return {
            "jobs": jobs,
            "devices": 64,
            "poll_unchanged_ms": known,
            "poll_unchanged_status": last.status_code,
            "poll_changed_ms": news,
            "poll_changed_cpu_ms": round(news_cpu, 1),
            "poll_changed_kib": round(len(changed.content) / 1024),
            "first_answer_ms": whole,
            "first_answer_kib": round(len(first.content) / 1024),
            "list_ms": listed,
            "airflows_own_100_task_instances_ms": own,
            "answer_to_drawn_ms": drawn(url, token, f"/saturn/plan/sweep_of_many/{run}", jobs, 5),
            "repeats": repeats,
            "machine": describe(),
        }


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        return write(args.write)
    figures = measure(args.jobs, args.repeats)
    print(json.dumps(figures, indent=2))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
