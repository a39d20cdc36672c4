"""Start the services, run the nightly DAG, show its progress, end with what came of it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live

from saturn_airflow.demo import view
from saturn_airflow.demo.airflow import Airflow
from saturn_airflow.demo.progress_lines import SweepProgress, read_job, read_plan, read_stages
from saturn_airflow.deployment.processes import end_on_signals
from saturn_airflow.deployment.services import LocalServices
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.folders import OF_SWEEPS, slug
from saturn_airflow.model.status import Status

GROUP = "sweep"


def run_demo(services: LocalServices, dag_id: str, keep: bool = False) -> int:
    """Run the demo; returns the exit status, 0 when every job finished.

    :param services: what it runs on; started here, and stopped.
    :param dag_id: a DAG with a sweep called ``sweep``.
    :param keep: leave the UIs up until Ctrl-C.
    :raises SaturnError: when a service does not start, with its log's end, or Airflow does not answer.
    """
    console = Console()
    end_on_signals()
    try:
        with console.status("Starting MLflow and Airflow ..."):
            services.start()
        console.print(f"Airflow {services.airflow_url}   MLflow {services.mlflow_url}", highlight=False)
        try:
            status = _run_sweep(services, dag_id, console)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise SaturnError(
                f"Airflow at {services.airflow_url} did not do as asked: {reason}; "
                f"its logs are in {services.processes.logs}"
            ) from None
        if keep:
            console.print("\nBoth UIs stay up; Ctrl-C stops them.")
            if services.how_to_log_in:
                console.print(services.how_to_log_in, highlight=False, soft_wrap=True)
            with suppress(KeyboardInterrupt):
                while True:
                    services.check()
                    time.sleep(1)
        return status
    finally:
        with console.status("Stopping MLflow and Airflow ..."):
            services.stop()


def _run_sweep(services: LocalServices, dag_id: str, console: Console) -> int:
    """Run the DAG once, show its progress and its result; the exit status."""
    airflow = Airflow(services.airflow_url, services.login)
    with console.status("Airflow is parsing the DAGs ..."):
        airflow.wait_for_dag(dag_id)
    run_id = airflow.trigger(dag_id)
    started = time.monotonic()
    progress = SweepProgress()
    stage_started: dict[str, float] = {}
    with Live(console=console, refresh_per_second=4, transient=False) as screen:
        while True:
            services.check()
            ended = False
            with suppress(httpx.HTTPError):  # a busy API server answers the next time
                _update(progress, airflow, services.home / "sweeps", dag_id, run_id)
                ended = airflow.state(dag_id, run_id) in ("success", "failed")
            _time_stages(progress, stage_started, console)
            if console.is_terminal:
                screen.update(view.live(progress, time.monotonic() - started))
            if ended:
                break
            time.sleep(0.5)
        _update(progress, airflow, services.home / "sweeps", dag_id, run_id)
        _time_stages(progress, stage_started, console)
        screen.update(view.live(progress, time.monotonic() - started))

    result = airflow.xcom(dag_id, run_id, f"{GROUP}.report")
    if result is None:
        raise SaturnError(f"the sweep left no result; see {services.airflow_url}/dags/{dag_id}/runs/{run_id}")
    console.print()
    console.print(view.result_table(result))
    if result["planned_seconds"] is not None:
        practice = result["current_practice_seconds"]
        saved = 1 - result["planned_seconds"] / practice
        console.print(
            f"Makespan: planned {result['planned_seconds']:.1f} s, proven within {100 * result['gap']:.1f}% "
            f"of the best plan there is; actual {result['actual_seconds']:.1f} s.\n"
            f"Estimated time saved against one job after another on all devices: {100 * saved:.0f}% "
            f"({practice:.1f} s there).",
            highlight=False,
        )
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in progress.stage_seconds.items())
    console.print(f"Stages: {stages}; all together {time.monotonic() - started:.0f} s.", highlight=False)
    console.print(
        f"Airflow {services.airflow_url}/dags/{dag_id}/runs/{run_id}", highlight=False, soft_wrap=True
    )
    console.print(f"MLflow  {result['mlflow_url']}", highlight=False, soft_wrap=True)
    for outcome in result["jobs"]:
        if outcome["status"] != Status.FINISHED:
            console.print(
                f"{outcome['job']} {outcome['status']}: {outcome['reason']}", style="red", markup=False
            )
    succeeded = airflow.state(dag_id, run_id) == "success"
    return 0 if succeeded and not result["failed"] else 1


def _update(progress: SweepProgress, airflow: Airflow, sweeps: Path, dag_id: str, run_id: str) -> None:
    """Read anew how far the sweep is.

    :param sweeps: the folder of all sweeps' files.
    """
    read_stages(progress, airflow.tasks(dag_id, run_id), GROUP)
    if progress.plan is None and progress.stages["plan"] == "done":
        plan = airflow.xcom(dag_id, run_id, f"{GROUP}.plan", "plan")
        entries = airflow.xcom(dag_id, run_id, f"{GROUP}.plan")
        if plan and entries:
            read_plan(progress, plan, entries)
    folder = sweeps / slug(dag_id) / slug(run_id) / GROUP
    for job in progress.jobs.values():
        if job.status != "finished":
            read_job(job, folder / slug(job.name, OF_SWEEPS))


def _time_stages(progress: SweepProgress, started: dict[str, float], console: Console) -> None:
    """Note how long stages took, and print them where the output is no terminal.

    :param started: when each stage was first seen to run, on the monotonic clock; this adds to it.
    """
    for stage, state in progress.stages.items():
        if state != "waiting" and stage not in started:
            started[stage] = time.monotonic()
            if not console.is_terminal:
                console.print(f"{stage} ...")
        if state in ("done", "failed") and stage not in progress.stage_seconds:
            progress.stage_seconds[stage] = time.monotonic() - started[stage]
            if not console.is_terminal:
                console.print(f"{stage} {state} after {progress.stage_seconds[stage]:.0f} s", highlight=False)
