"""How the demo looks in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from saturn_airflow.demo.progress_lines import STAGES, JobProgress, SweepProgress
from saturn_airflow.model.status import Status

_MARKS = {"waiting": ("·", "dim"), "running": ("●", "cyan"), "done": ("✔", "green"), "failed": ("✘", "red")}
_JOB_STYLES = {"finished": "green", "running": "cyan", "waiting": "yellow", "queued": "dim"}


def live(progress: SweepProgress, seconds: float) -> RenderableType:
    """The whole picture while the sweep runs.

    :param seconds: since it was triggered.
    """
    parts: list[RenderableType] = [_stages(progress, seconds)]
    if progress.stages["profile"] == "running" and progress.trials_all:
        parts.append(_trials(progress))
    if progress.plan is not None:
        parts += [_plan_line(progress.plan), _jobs(progress)]
    return Group(*parts)


def result_table(result: Mapping[str, Any]) -> Table:
    """One row per job: what was planned and what happened, and the metric that the best is chosen by."""
    best = result.get("best") or {}
    metric = best.get("metric", "loss")
    table = Table(box=box.SIMPLE_HEAD, title="What the sweep did", title_justify="left", title_style="bold")
    for name, justify in (
        ("job", "left"),
        ("technique", "left"),
        ("devices", "right"),
        ("planned", "right"),
        ("actual", "right"),
        (metric.replace("_", " "), "right"),
        ("", "left"),
    ):
        # Words are not broken, also where the terminal has 80 columns.
        whole = max(map(len, name.split()), default=0)
        table.add_column(name, justify=justify, min_width=whole, no_wrap=name == "job")  # type: ignore[arg-type]
    for outcome in result["jobs"]:
        failed = outcome["status"] != Status.FINISHED
        value = {**outcome, **(outcome.get("metrics") or {})}.get(metric)
        is_best = outcome["job"] == best.get("job")
        note = "best" if is_best else outcome["status"].replace("_", " ") if failed else ""
        table.add_row(
            Text(outcome["job"]),
            outcome.get("technique", "-"),
            str(outcome.get("devices", "-")),
            _seconds(outcome.get("planned_seconds")),
            _seconds(outcome.get("actual_seconds")),
            "-" if value is None else f"{value:.4f}",
            note,
            style="red" if failed else "bold" if note else None,
        )
    return table


def _stages(progress: SweepProgress, seconds: float) -> Text:
    line = Text()
    for stage in STAGES:
        mark, style = _MARKS[progress.stages[stage]]
        line.append(f"{mark} {stage}", style=style)
        if stage in progress.stage_seconds:
            line.append(f" {progress.stage_seconds[stage]:.0f} s", style="dim")
        line.append("   ")
    return line.append(f"{seconds:.0f} s", style="dim")


def _trials(progress: SweepProgress) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        ProgressBar(total=progress.trials_all, completed=progress.trials_done, width=30),
        f"{progress.trials_done} of {progress.trials_all} trials measured",
    )
    for name in progress.trials_running:
        grid.add_row("", Text(f"measuring {name}", style="dim"))
    return grid


def _plan_line(plan: Mapping[str, Any]) -> Text:
    return Text(
        f"Plan: {plan['makespan']:.0f} s for all jobs, at most {100 * plan['gap']:.1f}% from the best "
        f"there is (proven); one after another on all devices: {plan['current_practice']:.0f} s",
        style="bold",
    )


def _jobs(progress: SweepProgress) -> Table:
    width = max(len(name) for name in progress.jobs)
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=width)
    for job in progress.jobs.values():
        table.add_row(
            Text(job.name, style=_JOB_STYLES.get(job.status, "red")),
            Text(f"{job.technique} x {job.devices}", style="dim"),
            ProgressBar(total=max(job.batches, 1), completed=job.step, width=24),
            _job_words(job),
        )
    return table


def _job_words(job: JobProgress) -> Text:
    if job.status in ("queued", "waiting"):
        return Text(job.status, style="dim")
    words = Text(f"{job.step:>4}/{job.batches} ")
    if job.loss is not None:
        words.append(f"loss {job.loss:.3f} ")
    if job.status == "running" and job.eta_seconds is not None:
        words.append(f"{job.eta_seconds:.0f} s left", style="dim")
    elif job.status == "finished":
        words.append("✔", style="green")
    elif job.status != "running":
        words.append(f"{job.status.replace('_', ' ')}: {job.reason}", style="red")
    return words


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
