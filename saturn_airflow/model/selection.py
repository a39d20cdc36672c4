"""Which jobs are worth training on: selection between rounds. Plain data, and rules on what was measured.

A job's history is a mapping from epochs trained to the metric then. Rules see the histories of all jobs and
name those to drop. Optuna's pruners hold the same rules, but ask one running trial at a time and keep trials
in a store of their own; here all jobs are looked at together at a boundary, in a dozen lines each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from saturn_airflow.model import metrics, references
from saturn_airflow.model.arguments import checked
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.references import Reference

History = Mapping[float, float]
"""Metric by epochs trained."""

Histories = Mapping[str, History]
"""By job; jobs without a measurement have an empty one."""


class Selection(Protocol):
    """A rule that drops jobs."""

    def pruned(self, histories: Histories) -> list[str]:
        """Jobs that are not worth training on. Those already dropped are in ``histories`` too."""
        ...

    def next_rung(self, epochs: float) -> float:
        """The epochs at which a job that trained so many is judged next; infinite for its end."""
        ...


@checked("SuccessiveHalving")
@dataclass(frozen=True)
class SuccessiveHalving:
    """Of the jobs that reached a rung, only the best 1/reduction train on.

    Rungs are at ``min_epochs``, ``min_epochs * reduction``, ``min_epochs * reduction^2`` and so on: those
    who are left get ever more. A job is judged at each rung it has reached, among all that reached it, so
    that boundaries may come at any time. Source: Jamieson and Talwalkar, "Non-stochastic best arm
    identification and hyperparameter optimization" (AISTATS 2016); the rule for jobs that are not in step is
    that of Li et al., "A system for massively parallel hyperparameter tuning" (MLSys 2020).

    :param metric: ``"eval_loss"``, ``"epoch_loss"``, or one of the jobs' own.
    :param reduction: one in so many goes on.
    :param min_epochs: epochs that every job gets.
    :param mode: whether the metric is better small or large; losses are better small unless this says not.
    """

    metric: str = "eval_loss"
    reduction: int = 2
    min_epochs: int = 1
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _checked_mode(self.metric, self.mode))
        _check_whole("reduction", self.reduction, 2)
        _check_whole("min_epochs", self.min_epochs, 1)

    def pruned(self, histories: Histories) -> list[str]:
        """Jobs that at some rung were not among the best."""
        found: set[str] = set()
        rung = self.min_epochs
        longest = max((max(history, default=0.0) for history in histories.values()), default=0.0)
        while rung <= longest:
            reached = {job: value_at(history, rung) for job, history in histories.items() if job not in found}
            values = {job: value for job, value in reached.items() if value is not None}
            ranked = sorted(values, key=lambda job: (worse(values[job], self.mode), job))
            found.update(ranked[math.ceil(len(ranked) / self.reduction) :])
            rung *= self.reduction
        return sorted(found)

    def next_rung(self, epochs: float) -> float:
        """The least rung above ``epochs``."""
        rung = self.min_epochs
        while rung <= epochs:
            rung *= self.reduction
        return rung


@checked("MedianStopping")
@dataclass(frozen=True)
class MedianStopping:
    """A job stops whose best so far is worse than the median of what others averaged by then.

    Source: Golovin et al., "Google Vizier: a service for black-box optimization" (KDD 2017).

    :param metric: ``"eval_loss"``, ``"epoch_loss"``, or one of the jobs' own.
    :param min_epochs: epochs that every job gets.
    :param min_jobs: how many other jobs must have come as far.
    :param mode: whether the metric is better small or large; losses are better small unless this says not.
    """

    metric: str = "eval_loss"
    min_epochs: int = 1
    min_jobs: int = 3
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _checked_mode(self.metric, self.mode))
        _check_whole("min_epochs", self.min_epochs, 1)
        _check_whole("min_jobs", self.min_jobs, 1)

    def pruned(self, histories: Histories) -> list[str]:
        """Jobs below the median."""
        found = []
        for job, history in sorted(histories.items()):
            at = max(history, default=0.0)
            if at < self.min_epochs:
                continue
            others = [
                statistics.fmean([worse(v, self.mode) for epochs, v in other.items() if epochs <= at])
                for name, other in histories.items()
                if name != job and max(other, default=0.0) >= at
            ]
            best = min(worse(value, self.mode) for value in history.values())
            if len(others) >= self.min_jobs and best > statistics.median(others):
                found.append(job)
        return found

    def next_rung(self, epochs: float) -> float:
        """Infinite: there are no rungs, jobs are judged wherever they are."""
        return math.inf


@dataclass(frozen=True)
class Chosen:
    """A user's own rule: a function of the histories that returns the names of the jobs to drop.

    :param function: a module-level function, or its ``"module:name"``.
    :param metric: what it gets the histories of.
    """

    function: Reference
    metric: str = "eval_loss"

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", references.to_reference(self.function, "selection"))
        _checked_mode(self.metric, "min")

    def pruned(self, histories: Histories) -> list[str]:
        """What the function returned.

        :raises InvalidSweepError: when that is no list of names of jobs.
        """
        assert isinstance(self.function, str)
        function: Callable[[Histories], Any] = references.load(self.function)
        found = function({job: dict(history) for job, history in histories.items()})
        names = list(found) if isinstance(found, list | tuple | set | frozenset) else None
        if names is None or not all(isinstance(name, str) for name in names):
            raise InvalidSweepError(
                f"selection: {self.function} returned {found!r:.80}; it returns a list of names of jobs"
            )
        if unknown := [name for name in names if name not in histories]:
            raise InvalidSweepError(f"selection: {self.function} drops {unknown[0]!r}, which is no job")
        return sorted(names)

    def next_rung(self, epochs: float) -> float:
        """Infinite: there are no rungs, jobs are judged wherever they are."""
        return math.inf


Rule = SuccessiveHalving | MedianStopping | Chosen


def rule_of(value: object) -> Rule:
    """What a user gave as ``selection=``: a rule, or a function of their own.

    :raises InvalidSweepError: for anything else.
    """
    if isinstance(value, SuccessiveHalving | MedianStopping | Chosen):
        return value
    if isinstance(value, type) and issubclass(value, SuccessiveHalving | MedianStopping):
        raise InvalidSweepError(f"selection is the class {value.__name__}; write {value.__name__}(...)")
    if callable(value) or (isinstance(value, str) and ":" in value):
        return Chosen(value)
    raise InvalidSweepError(
        f"selection is {value!r:.60}; give SuccessiveHalving(...), MedianStopping(...), or a function "
        "or its 'module:name'"
    )


class Selected:
    """What a rule decided, and what was said about it."""

    def __init__(self, pruned: Sequence[str], warnings: Sequence[str] = ()) -> None:
        self.pruned = tuple(pruned)
        self.warnings = tuple(warnings)


def select(rule: Selection, histories: Histories, going: Sequence[str], metric: str) -> Selected:
    """Which of the jobs still ``going`` to drop. A rule that is wrong drops none, and is told of.

    :param going: jobs that are neither done nor dropped.
    :param metric: its name, for messages.
    """
    if not any(histories.values()):
        return Selected((), (f"no job has reported {metric} yet, so none is dropped",))
    try:
        dropped = [job for job in rule.pruned(histories) if job in going]
    except Exception as error:
        return Selected(
            (), (f"the selection failed ({type(error).__name__}: {error}); the sweep goes on without it",)
        )
    finished = [job for job in histories if job not in going and histories[job]]
    if going and len(dropped) == len(going) and not finished:
        return Selected((), ("the selection drops every job; the sweep goes on with all of them",))
    return Selected(dropped)


def what_doomed(
    dropped: Sequence[str], histories: Histories, going: Sequence[str], metric: str
) -> dict[str, str]:
    """In words, what each of the ``dropped`` had, and what those had by then that stay of the ``going``."""
    staying = [histories[job] for job in going if job not in dropped]
    return {job: _what_doomed(histories[job], staying, metric) for job in dropped}


def _what_doomed(history: History, staying: Sequence[History], metric: str) -> str:
    if not history:
        return f"it has no {metric}"
    epochs = max(history)
    others = [value_at(other, epochs) for other in staying]
    known = sorted(value for value in others if value is not None and math.isfinite(value))
    told = f"{metric} {history[epochs]:.4g} after {epochs:g} epoch{'' if epochs == 1 else 's'}"
    if not known:
        return told
    span = f"{known[0]:.4g}" if known[0] == known[-1] else f"{known[0]:.4g} to {known[-1]:.4g}"
    return f"{told}; those that stay had {span} by then"


def value_at(history: History, epochs: float) -> float | None:
    """The metric at the last measurement up to ``epochs``; None for a job that has not come so far."""
    if max(history, default=0.0) < epochs:
        return None
    return history[max((at for at in history if at <= epochs), default=min(history))]


def worse(value: float, mode: str | None) -> float:
    """``value`` in a form that is larger where it is worse; what is no number is worst."""
    if not math.isfinite(value):
        return math.inf
    return -value if mode == "max" else value


def _checked_mode(metric: object, mode: str | None) -> str:
    if not isinstance(metric, str) or metric == "loss":
        raise InvalidSweepError(
            f"selection: metric is {metric!r}, which is not measured at the end of each epoch; choose "
            "'eval_loss', 'epoch_loss' or a metric of the jobs' own"
        )
    return metrics.check_mode(metric, mode, "selection")


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSweepError(f"selection: {name} is {value!r}; give a whole number of at least {least}")
