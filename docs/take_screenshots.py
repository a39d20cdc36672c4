"""Make the docs' screenshots: run the demo, photograph what Airflow and MLflow show of it.

    python docs/take_screenshots.py                    # some minutes; writes docs/images/*.png
    python docs/take_screenshots.py --state .saturn    # of a demo that ran before with that state

Needs Debian's package chromium, or another with its path in CHROMIUM.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from mlflow import MlflowClient
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.demo.run import run_demo
from saturn_airflow.demo.services import Services

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DAG = "nightly_retrain"
SIZE = {"width": 1500, "height": 1150}
PATIENCE = 120_000  # milliseconds
COLORS = 192  # of a picture's palette: screenshots of pages need no more


@dataclass
class Sweep:
    """Where the demo's sweep is to be seen.

    :param airflow: Airflow's address.
    :param run: the path of its DAG run.
    :param mlflow: MLflow's address.
    :param jobs: the ids of its jobs' MLflow runs.
    """

    airflow: str
    run: str
    mlflow: str
    experiment: str
    jobs: list[str]


def main() -> int:
    """Run the demo where that has not been done, and take the pictures."""
    parser = argparse.ArgumentParser(description="Make the docs' screenshots from a real run.")
    parser.add_argument("--state", type=Path, help="the state of a demo that ran, or is to run, there")
    args = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        print("There is no chromium here; install it, or name one in CHROMIUM", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        state = args.state or Path(folder)
        if not (state / "mlflow.db").exists() and run_demo(Services(state, ROOT / "dags"), DAG):
            return 1
        with shown(state) as sweep, sync_playwright() as playwright:
            # Containers seldom allow what Chromium's own sandbox needs; it sees no page but these.
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, take in PICTURES.items():
                page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
                page.set_default_timeout(PATIENCE)
                take(page, sweep)
                save(page, name)
                page.close()
            browser.close()
    return 0


@contextmanager
def shown(state: Path) -> Iterator[Sweep]:
    """The sweep in ``state``, with Airflow and MLflow up."""
    with Services(state, ROOT / "dags") as services:
        airflow = Airflow(services.airflow_url)
        airflow.send("PATCH", f"/dags/{DAG}", {"is_paused": True})
        runs = airflow.get(f"/dags/{DAG}/dagRuns", state="success", order_by="-id")["dag_runs"]
        client = MlflowClient(services.mlflow_url)
        experiment = client.get_experiment_by_name(DAG)
        jobs = client.search_runs([experiment.experiment_id], "tags.`saturn.status` = 'finished'")
        jobs = [job for job in jobs if "mlflow.parentRunId" in job.data.tags]
        run = quote(runs[0]["dag_run_id"], safe="")
        ids = [job.info.run_id for job in jobs]
        yield Sweep(services.airflow_url, run, services.mlflow_url, experiment.experiment_id, ids)


def plan_page(page: Page, sweep: Sweep, theme: str = "light") -> None:
    """The plan in Airflow's UI, and why the best job runs as it does."""
    page.add_init_script(f"localStorage.setItem('theme', '{theme}')")
    page.goto(f"{sweep.airflow}/dags/{DAG}/runs/{sweep.run}/plugin/saturn-plan")
    frame = page.frame_locator("iframe")
    frame.locator("#totals button").click()
    frame.locator("#details .options").wait_for()
    page.wait_for_timeout(1500)  # charts move to their places


def plan_page_dark(page: Page, sweep: Sweep) -> None:
    """The same, dark."""
    plan_page(page, sweep, "dark")


def airflow_grid(page: Page, sweep: Sweep) -> None:
    """The mapped train tasks, each under its job's name."""
    page.goto(f"{sweep.airflow}/dags/{DAG}/runs/{sweep.run}/tasks/sweep.train/mapped")
    page.get_by_label("Expand all task groups").click()
    page.get_by_text("vit-64-lr0.003").first.wait_for()
    page.wait_for_timeout(1500)


def mlflow_table(page: Page, sweep: Sweep) -> None:
    """The jobs of the sweep as a table."""
    _open_mlflow(page, sweep, "")
    page.get_by_text("Expand rows").click()
    page.wait_for_timeout(2000)


def mlflow_charts(page: Page, sweep: Sweep) -> None:
    """Their metrics as charts."""
    _open_mlflow(page, sweep, "&compareRunsMode=CHART")


def mlflow_parallel(page: Page, sweep: Sweep) -> None:
    """Hyper-parameters against losses."""
    runs, experiments = (quote(str(ids).replace("'", '"')) for ids in (sweep.jobs, [sweep.experiment]))
    page.goto(f"{sweep.mlflow}/#/compare-runs?runs={runs}&experiments={experiments}")
    page.wait_for_timeout(5000)


def _open_mlflow(page: Page, sweep: Sweep, more: str) -> None:
    page.goto(f"{sweep.mlflow}/#/experiments/{sweep.experiment}/runs?workflowType=machine_learning{more}")
    page.wait_for_timeout(5000)


PICTURES: dict[str, Callable[[Page, Sweep], None]] = {
    "plan_page": plan_page,
    "plan_page_dark": plan_page_dark,
    "airflow_grid": airflow_grid,
    "mlflow_table": mlflow_table,
    "mlflow_parallel": mlflow_parallel,
    "mlflow_charts": mlflow_charts,
}


def save(page: Page, name: str) -> None:
    """Write what the page shows, with a palette: a third of the bytes."""
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = IMAGES / f"{name}.png"
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())
