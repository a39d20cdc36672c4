"""The result of a sweep as a table for its report's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.printable import in_short
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.status import Status
from saturn_airflow.operators.choosing import in_words


def table(result: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The result as a table for the task's log."""
    return "\n".join([*_rows(result, outcomes), *_figures(result), *_endings(result, outcomes)])


def _rows(result: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each job, below one with what stands in them."""
    width = max(len(o.job) for o in outcomes)
    metric = result["best"]["metric"] if result["best"] else "loss"
    wide = max(9, len(metric))
    lines = [f"{'job':{width}}  {'strategy':14} {'planned':>9} {'actual':>9} {metric:>{wide}}  status"]
    for o in outcomes:
        strategy = f"{o.planned.technique} x {o.planned.devices}" if o.planned else "-"
        planned = f"{o.planned.planned_seconds:.1f} s" if o.planned else "-"
        actual = f"{o.held.actual_seconds:.1f} s" if o.held else "-"
        value = "-" if (found := o.value_of(metric)) is None else f"{found:.4f}"
        lines.append(f"{o.job:{width}}  {strategy:14} {planned:>9} {actual:>9} {value:>{wide}}  {o.status}")
    return lines


def why_ended(outcome: Outcome) -> str:
    """Why a job came to nothing; a traceback is left to the log of the task that met it."""
    return in_short(outcome.reason or "no reason was told")


def _figures(result: Mapping[str, Any]) -> list[str]:
    """What was planned next to what it took."""
    lines = []
    if result.get("planned_seconds"):
        lines.append(
            f"makespan: planned {result['planned_seconds']:.1f} s (gap {100 * result['gap']:.1f}%), "
            f"actual {result['actual_seconds']:.1f} s, "
            f"devices busy {100 * result['utilisation']:.0f}% of it; "
            f"one after another on whole nodes: {result['current_practice_seconds']:.1f} s"
        )
    if (promise := result.get("promise")) and promise.get("seconds") is not None:
        words = {True: "kept", False: "NOT KEPT", None: "not to be judged: not all jobs finished"}
        lines.append(
            f"done with {promise['confidence']:.0%} in {promise['seconds']:.1f} s of its plan: "
            f"{words[promise['kept']]} ({promise['took']:.1f} s)"
        )
    if due := result.get("deadline"):
        late = due["late_seconds"]
        lines.append(
            f"the deadline was met, with {-late:.0f} s to spare"
            if due["met"]
            else f"THE DEADLINE WAS MISSED by {late:.0f} s"
            + ("" if due["planned"] else ", as the plan had foreseen")
        )
    if "estimate_error_median" in result:
        lines.append(
            f"seconds per job were off by {100 * result['estimate_error_median']:.0f}% (median), "
            f"{100 * result['estimate_error_p90']:.0f}% (90th percentile)"
        )
    if "profile_seconds" in result:
        lines.append(
            f"{result['trials']} trials took {result['profile_seconds']:.0f} s, "
            f"{100 * result['profile_share']:.0f}% of the sweep's {result['sweep_seconds']:.0f} s"
        )
    for entry in result.get("drifted", ()):
        lines.append(
            f"{', '.join(entry['jobs'])} under {entry['technique']} x {entry['devices']}: {entry['what']}; "
            "the next plan goes by what training took"
        )
    return lines


def _untold_refusals(outcome: Outcome) -> list[RefusedStrategy]:
    """Those that the outcome's reason does not tell."""
    planned = outcome.planned
    own = (planned.technique, planned.devices, outcome.status) if planned else None
    return [one for one in outcome.refusals if (one.technique, one.devices, one.status) != own]


def _endings(result: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """The best job, and what became of those that did not finish."""
    lines = []
    if best := result["best"]:
        lines.append(f"best: {best['job']} ({best['metric']} {best['value']:.4f}) {best['model_uri'] or ''}")
    if champion := result.get("champion"):
        lines.append(in_words(champion))
    if registered := result.get("registered"):
        version = registered["version"]
        what = f"version {version} @{registered['alias']}" if version else "nothing new"
        lines.append(f"registered as {registered['name']}: {what} ({registered['reason']})")
    lines += [f"{o.job}: {o.mixed}" for o in outcomes if o.mixed]
    lines += [f"{o.job}: {refusal.in_words}" for o in outcomes for refusal in _untold_refusals(o)]
    return lines + [
        f"{o.job} {o.reason}"
        if o.status == Status.FINISHED
        else f"{o.job} {o.status.in_words}: {why_ended(o)}"
        for o in outcomes
        if o.reason or o.status != Status.FINISHED
    ]
