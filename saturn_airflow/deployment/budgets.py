"""Whether the limits of jobs and checkpoints can be read, and whether checkpoints keep to theirs."""

from __future__ import annotations

from collections.abc import Iterator

from saturn_airflow.deployment.findings import Deployment, Finding
from saturn_airflow.model import sizes
from saturn_airflow.model.errors import InvalidSweepError


def check_budgets(deployment: Deployment) -> Iterator[Finding]:
    """Checkpoints take no more than they may, and the settings that say so are amounts."""
    from airflow.sdk.exceptions import AirflowFailException

    from saturn_airflow.launch import checkpoint_budget
    from saturn_airflow.operators.checkpoint_budgets import SETTING, deployments_budget
    from saturn_airflow.operators.context import home, job_memory

    most, wrong = None, False
    try:
        job_memory()
    except AirflowFailException as error:
        wrong = True
        yield Finding("budgets", "problem", str(error), "correct it; until then jobs fail")
    try:
        most = deployments_budget()
    except InvalidSweepError as error:
        wrong = True
        yield Finding("budgets", "problem", str(error), "correct it; until then there is no limit")
    taken = checkpoint_budget.taken_by(checkpoint_budget.sweeps_of(home()))
    text = f"checkpoints take {sizes.shown(taken)}"
    if most is not None and taken > most:
        fix = f"raise {SETTING}, lower keep_checkpoints, or remove sweeps that nobody needs from {home()}"
        yield Finding("budgets", "warning", f"{text}; {SETTING} is {sizes.shown(most)}", fix)
    elif not wrong:
        yield Finding("budgets", "ok", text if most is None else f"{text} of {sizes.shown(most)}")
