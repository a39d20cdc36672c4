"""What the author of a DAG says of the tasks of one stage: their pool, their priority, their callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saturn_airflow.model.arguments import hint
from saturn_airflow.model.errors import InvalidSweepError

#: What any task of Airflow takes and no sweep decides by itself.
_ANY = (
    *("pool", "pool_slots", "priority_weight", "weight_rule", "owner", "executor_config", "doc_md"),
    *("on_execute_callback", "on_success_callback", "on_failure_callback", "on_retry_callback"),
    *("on_skipped_callback", "execution_timeout", "email", "email_on_failure", "email_on_retry"),
)
#: Tasks on a node are in the queue of its worker; the others may have one of their own.
_OFF_NODES = (*_ANY, "queue", "executor")


@dataclass(frozen=True)
class Stages:
    """Further arguments of the operators of each stage.

    :param plan: of all that decide: ``trials``, ``choose``, ``plan``, and those that hand out their parts.
    """

    profile: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            _check(f"{name}_args", given, _ANY if name in ("profile", "train") else _OFF_NODES)


def _check(what: str, given: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(given, Mapping):
        raise InvalidSweepError(
            f"{what} is {given!r:.60}; give the arguments of its tasks, such as {{'pool': 'gpus'}}"
        )
    for name in given:
        if name not in allowed:
            meant = hint(name, allowed, f"it takes {', '.join(allowed)}")
            raise InvalidSweepError(f"{what} has {name!r}, which is not for it to say; {meant}")
