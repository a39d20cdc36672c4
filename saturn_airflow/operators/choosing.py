"""Which of a sweep's jobs is the best, and whether its model can be registered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saturn_airflow.model.outcomes import Outcome
from saturn_airflow.model.status import Status


def best_of(outcomes: Sequence[Outcome], metric: str | None, mode: str) -> dict[str, Any] | None:
    """The best of the trained jobs.

    Without a ``metric``, ``eval_loss`` counts where every trained job has it, else the mean loss over the
    last epoch.
    """
    finished = [o for o in outcomes if o.status == Status.FINISHED]
    if metric is None:
        metric = "eval_loss" if all(o.eval_loss is not None for o in finished) else "epoch_loss"
    having = [(value, o) for o in finished if (value := o.value_of(metric)) is not None]
    if not having:
        return None
    value, best = (min if mode == "min" else max)(having, key=lambda pair: pair[0])
    return {
        "job": best.job,
        "metric": metric,
        "value": value,
        "model_uri": best.model_uri,
        "checkpoint": best.checkpoint,
        "run_id": best.run_id,
    }


def why_no_best(outcomes: Sequence[Outcome], metric: str | None) -> str | None:
    """Why none of the trained jobs is the best by ``metric``, if so: a mapping may lack it."""
    finished = [o for o in outcomes if o.status == Status.FINISHED]
    if not finished or best_of(outcomes, metric, "min") is not None:
        return None
    if metric is None:
        return (
            "no job has told a loss that is a number, so none is the best and none is registered; a "
            "technique that trains by itself tells it with emit('step', ...) and emit('eval', ...)"
        )
    known = sorted({name for o in finished for name in o.metrics if o.value_of(name) is not None})
    return (
        f"no job has a number as its {metric!r}, so none is the best and none is registered; "
        f"of their own they have {', '.join(known) or 'no metrics'}"
    )


def why_no_model(best: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str | None:
    """Why the best job can't be registered: it left no model; None where it left one."""
    if any(outcome.job == best["job"] and outcome.model for outcome in outcomes):
        return None
    return f"{best['job']} left no model; a technique that trains by itself calls session.export(model)"


def not_registered(register_as: str, why: str) -> dict[str, Any]:
    """What the result says under ``registered`` where nothing is."""
    name, _, alias = register_as.partition("@")
    nothing = {"version": None, "champion": None, "reason": why}
    return {"name": name, "alias": alias or "champion", **nothing}


def compared(against: Mapping[str, Any], best: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The champion beside the best job on the same data.

    :returns: ``version``, ``metric``, ``value``, ``best`` (value), and ``beaten_by``: by how much the best is
        better; negative where it is worse.
    """
    better = against["value"] - best["value"] if mode == "min" else best["value"] - against["value"]
    return {
        "version": against["version"],
        "metric": best["metric"],
        "value": against["value"],
        "best": best["value"],
        "beaten_by": better,
    }


def in_words(champion: Mapping[str, Any]) -> str:
    """What :func:`compared` found, as a line for people."""
    by, value = champion["beaten_by"], champion["value"]
    share = f" ({abs(by / value):.1%})" if value else ""
    verdict = "beats it by" if by > 0 else "does not beat it, and is worse by"
    return (
        f"champion: version {champion['version']} has {champion['metric']} {value:.4f} on this sweep's data; "
        f"the best has {champion['best']:.4f}, which {verdict} {abs(by):.4g}{share}"
    )
