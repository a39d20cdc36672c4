"""Make the docs' screenshots: run the demo, photograph what Airflow and MLflow show of it.

    python docs/take_screenshots.py                    # some minutes; writes docs/images/*.png
    python docs/take_screenshots.py --state .saturn    # of a demo that ran before with that state

Needs Debian's package chromium, or another with its path in CHROMIUM.
"""

from __future__ import annotations

import argparse
import io
import json
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
from saturn_airflow.demo.demo_services import Services
from saturn_airflow.demo.run import run_demo

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DAG = "nightly_retrain"
WIDTH = 1500
PATIENCE = 120_000  # milliseconds
#: What the table in MLflow shows; MLflow keeps a visitor's choice of columns in the browser.
COLUMNS = [
    *(f"metrics.`{name}`" for name in ("eval_loss", "planned_seconds", "actual_seconds")),
    *(f"params.`{name}`" for name in ("lr", "model.n_embd", "model.hidden_size", "technique", "devices")),
]
#: In MLflow's search box: only jobs have this parameter.
JOBS_ONLY = "params.job LIKE '%'"


@dataclass
class Sweep:
    """Where the demo's sweep is to be seen.

    :param airflow: Airflow's address.
    :param run: the path of its DAG run.
    :param mlflow: MLflow's address.
    """

    airflow: str
    run: str
    mlflow: str
    experiment: str


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
            for name, (take, height) in PICTURES.items():
                size = {"width": WIDTH, "height": height}
                page = browser.new_page(viewport=size, color_scheme="light", reduced_motion="reduce")
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
        experiment = MlflowClient(services.mlflow_url).get_experiment_by_name(DAG)
        run = quote(runs[0]["dag_run_id"], safe="")
        yield Sweep(services.airflow_url, run, services.mlflow_url, experiment.experiment_id)


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
    """The jobs of the sweep as a table, the best first."""
    key = f"MLflowLocalStorage-1.1-ExperimentPage-{json.dumps([sweep.experiment])}-ReactComponentState"
    chosen = json.dumps({"selectedColumns": COLUMNS})
    page.add_init_script(f"localStorage.setItem({json.dumps(key)}, {json.dumps(chosen)})")
    page.goto(_jobs_of(sweep))
    page.get_by_text("vit-64-lr0.003").first.wait_for()
    _close_assistant(page)


def mlflow_charts(page: Page, sweep: Sweep) -> None:
    """The losses of all jobs."""
    page.goto(f"{_jobs_of(sweep)}&compareRunsMode=CHART")
    page.get_by_text("vit-64-lr0.003").first.wait_for()
    _close_assistant(page)
    page.get_by_placeholder("Search metric charts").fill("loss")
    page.wait_for_timeout(3000)


def _jobs_of(sweep: Sweep) -> str:
    """The sweep's jobs in MLflow, the best first."""
    query = {"searchFilter": JOBS_ONLY, "orderByKey": "metrics.`eval_loss`", "orderByAsc": "true"}
    asked = "&".join(f"{key}={quote(value)}" for key, value in query.items())
    return f"{sweep.mlflow}/#/experiments/{sweep.experiment}/runs?workflowType=machine_learning&{asked}"


def _close_assistant(page: Page) -> None:
    """Close what MLflow opens beside its pages on a first visit; its button has no name."""
    page.get_by_text("MLflow Assistant").first.wait_for()
    page.wait_for_timeout(1500)
    page.mouse.click(WIDTH - 36, 36)
    page.wait_for_timeout(1500)


#: How to take each picture, and how high it is.
PICTURES: dict[str, tuple[Callable[[Page, Sweep], None], int]] = {
    "plan_page": (plan_page, 1150),
    "plan_page_dark": (plan_page_dark, 1150),
    "airflow_grid": (airflow_grid, 820),
    "mlflow_table": (mlflow_table, 620),
    "mlflow_charts": (mlflow_charts, 700),
}


def save(page: Page, name: str) -> None:
    """Write what the page shows, in as few bytes as that takes."""
    path = IMAGES / f"{name}.png"
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())
