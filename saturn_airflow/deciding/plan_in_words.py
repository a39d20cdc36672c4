"""A plan, and what was decided at a boundary, in words for a task's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saturn_airflow.model.plan import Plan
from saturn_airflow.model.settings import MAKESPAN

if TYPE_CHECKING:
    from saturn_airflow.planning.online.adoption import Adoption


def summary(plan: Plan, practice: Plan) -> str:
    """The plan in a few lines for the task's log."""
    lines = [
        f"Planned {len(plan.assignments)} jobs in {plan.seconds:.1f} s: makespan {plan.makespan:.1f} s, "
        f"proven lower bound {plan.lower_bound:.1f} s (gap {100 * plan.gap:.1f}%). "
        f"One after another on whole nodes they would take {practice.makespan:.1f} s."
    ]
    for a in sorted(plan.assignments, key=lambda a: (a.start, a.job)):
        devices = ",".join(str(i) for i in a.device_ids)
        lines.append(
            f"  {a.start:8.1f} - {a.end:8.1f} s  {a.job}  {a.technique} x {a.devices}  {a.node}[{devices}]"
        )
    return "\n".join(lines)


def in_words(adoption: Adoption, objective: str) -> str:
    """What was decided at a boundary."""
    if not adoption.adopted:
        return "The plan is carried on: no other wins more than its moves cost"
    if objective != MAKESPAN:
        return f"A new plan: it ends in {adoption.plan.makespan:.1f} s, moves included"
    return (
        f"A new plan: all is done in {adoption.expected:.1f} s, moves included; "
        f"the one before would take {adoption.otherwise - adoption.expected:.1f} s more"
    )
