"""What a sweep was asked to do: all its tasks are given the same. Plain data, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from saturn_airflow.model import metrics, sizes
from saturn_airflow.model.cluster import Cluster
from saturn_airflow.model.deadlines import Deadline
from saturn_airflow.model.errors import InvalidSweepError
from saturn_airflow.model.rounds import Rounds
from saturn_airflow.model.selection import Rule

#: The Airflow connection to MLflow.
MLFLOW_CONNECTION = "mlflow_default"
Profile = Literal["auto", "fresh", "never"]
Objective = Literal["makespan", "mean-completion", "device-time"]
MAKESPAN: Objective = "makespan"
DEVICE_TIME: Objective = "device-time"
OnMissingNode = Literal["leave_out", "fail"]
LEAVE_OUT: OnMissingNode = "leave_out"
#: The odds of the ends that are shown where no others are asked for.
PROMISED = 0.9
#: Rarer ends than these no few earlier errors can tell.
MOST_CONFIDENT = 0.99


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """The arguments of ``SaturnSweepOperator``, which describes them, but for the jobs.

    :param group: the id of the sweep's task group.
    :param techniques: None for all in the library.
    :param checkpoint_every: seconds.
    :param job_timeout: seconds.
    :param confidence: the odds with which the deadline is to be kept; None for those of the expected end.
    :param priority: among the sweeps that want the same devices: a higher one goes first.
    :param team: whose sweep it is; empty for nobody's.
    :param preempt: whether its running jobs may be stopped at a checkpoint for other sweeps.
    :raises InvalidSweepError: for what can't be meant.
    """

    cluster: Cluster
    group: str = ""
    techniques: Sequence[str] | None = None
    profile: Profile = "auto"
    planning_seconds: float = 10.0
    objective: Objective = MAKESPAN
    deadline: Deadline | None = None
    confidence: float | None = None
    on_missed_deadline: str | None = None
    metric: str | None = None
    mode: metrics.Mode | None = None
    register_as: str | None = None
    checkpoint_every: float = 60.0
    keep_checkpoints: int = 2
    checkpoints_budget: str | None = None
    retries: int = 2
    job_timeout: float | None = None
    allowed_failures: int = 0
    rounds: Rounds = field(default_factory=lambda: Rounds(most=1))
    selection: Rule | None = None
    experiment: str | None = None
    mlflow_conn_id: str = MLFLOW_CONNECTION
    on_missing_node: OnMissingNode = LEAVE_OUT
    priority: float = 0.0
    preempt: bool = False
    team: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.cluster, Cluster):
            raise InvalidSweepError(
                f"cluster is {self.cluster!r:.60}; write Cluster(Node('name', devices=...))"
            )
        if self.experiment is not None and not (isinstance(self.experiment, str) and self.experiment.strip()):
            raise InvalidSweepError(
                f"experiment is {self.experiment!r}; give the name of an MLflow experiment"
            )
        _check_choice("profile", self.profile, ("auto", "fresh", "never"))
        _check_choice("objective", self.objective, (MAKESPAN, "mean-completion", DEVICE_TIME))
        _check_choice("on_missing_node", self.on_missing_node, (LEAVE_OUT, "fail"))
        for name in ("planning_seconds", "checkpoint_every"):
            _check_number(name, getattr(self, name))
        for name, least in (("keep_checkpoints", 1), ("retries", 0), ("allowed_failures", 0)):
            _check_count(name, getattr(self, name), least)
        if self.checkpoints_budget is not None:
            sizes.bytes_of(str(self.checkpoints_budget), "checkpoints_budget")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int | float):
            raise InvalidSweepError(f"priority is {self.priority!r}; give a number, such as 10")
        if not math.isfinite(self.priority):
            raise InvalidSweepError(f"priority is {self.priority!r}; give a finite number")
        if not isinstance(self.preempt, bool):
            raise InvalidSweepError(f"preempt is {self.preempt!r}; give True or False")
        if self.preempt and self.rounds.most > 1:
            raise InvalidSweepError(
                "preempt=True goes with one round: with several, jobs stop at a round's end; "
                "leave out rounds or preempt"
            )
        if not isinstance(self.mlflow_conn_id, str) or not self.mlflow_conn_id.strip():
            raise InvalidSweepError(
                f"mlflow_conn_id is {self.mlflow_conn_id!r}; give the id of an Airflow connection"
            )
        if not isinstance(self.team, str):
            raise InvalidSweepError(f"team is {self.team!r}; give a name, such as 'vision'")
        self._check_deadline()
        if self.selection is not None and self.rounds.most == 1:
            raise InvalidSweepError(
                "selection drops jobs between rounds, and there is one; give rounds=2 or more"
            )

    def _check_deadline(self) -> None:
        if self.deadline is None and self.objective == DEVICE_TIME:
            raise InvalidSweepError(
                "objective is 'device-time', which needs a deadline: give deadline=timedelta(hours=6) "
                "or a time of day, such as '06:00'"
            )
        if self.deadline is None and self.on_missed_deadline is not None:
            raise InvalidSweepError("on_missed_deadline needs a deadline to be missed: give deadline=")
        if self.confidence is not None:
            _check_confidence(self.confidence, self.deadline)
        if self.deadline is not None and self.objective != DEVICE_TIME:
            raise InvalidSweepError(
                f"deadline goes with objective='device-time', not with {self.objective!r}, which is as early "
                "as can be already"
            )

    @property
    def last_round(self) -> int:
        """The last round of the DAG: with several nodes one more than are asked for, in reserve for a node
        that is lost in the last of those."""
        return self.rounds.most + (1 if len(self.cluster) > 1 else 0)

    @property
    def promised(self) -> float:
        """The odds of the ends that are shown."""
        return PROMISED if self.confidence is None else self.confidence

    @property
    def trials_task(self) -> str:
        """The id of the sweep's first task."""
        return f"{self.group}.trials"

    @property
    def report_task(self) -> str:
        """The id of the sweep's last task."""
        return f"{self.group}.report"

    @property
    def better(self) -> metrics.Mode:
        """Whether the metric is better small or large."""
        return self.mode or "min"

    @property
    def compared_by(self) -> Mapping[str, str | None]:
        """What the jobs are compared by, by who names it."""
        by = {"metric": self.metric}
        return by if self.selection is None else {**by, "selection: its metric": self.selection.metric}


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise InvalidSweepError(f"{name} is {value!r}; it is {' or '.join(map(repr, choices))}")


def _check_confidence(value: object, deadline: Deadline | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.5 <= value <= MOST_CONFIDENT:
        raise InvalidSweepError(
            f"confidence is {value!r}; give the odds with which the deadline is to be kept, from 0.5 to "
            f"{MOST_CONFIDENT}, such as 0.9"
        )
    if deadline is None:
        raise InvalidSweepError(
            "confidence says how surely a deadline is to be kept, and there is none: give deadline= and "
            "objective='device-time', or leave it out"
        )


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidSweepError(f"{name} is {value!r}; give a number of seconds or a timedelta, above 0")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSweepError(f"{name} is {value!r}; give a whole number of at least {least}")
