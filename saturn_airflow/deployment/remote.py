"""A question that Celery workers answer: what is on your machine?

Workers load this module when their configuration says so:
``[celery] extra_celery_config = {"imports": ["saturn_airflow.deployment.remote"]}``. The answer comes from
the worker's main process through Celery's remote control, which takes a fraction of a second and no slot of
a task; so a node that is busy, or whose tasks can't start, answers too.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

from celery.worker.control import inspect_command

# Who loads this module is a worker, and takes over from the one that was killed.
import saturn_airflow.deployment.taking_over  # noqa: F401

COMMAND = "saturn_survey"
#: Seconds after which the worker says that it has no answer: those who ask wait 10.
_ANSWER_SECONDS = 8.0


@inspect_command(name=COMMAND, args=[("mark", str), ("mlflow", str)])  # type: ignore[untyped-decorator]
def saturn_survey(state: Any, mark: str, mlflow: str) -> dict[str, Any]:
    """This worker's machine, as :func:`saturn_airflow.deployment.survey.survey` sees it.

    Besides, ``waits_for_results``: whether a task begins when the database of Celery's results is back.
    """
    from saturn_airflow.deployment.survey import survey

    # Storage that hangs must not hang the worker, which asks for tasks in this thread.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        found = pool.submit(survey, state.hostname, mark, mlflow).result(_ANSWER_SECONDS)
        return {**found, "waits_for_results": bool(state.app.conf.result_backend_always_retry)}
    except concurrent.futures.TimeoutError:
        return {"error": f"no answer within {_ANSWER_SECONDS:.0f} s; does its storage hang?"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        pool.shutdown(wait=False)
