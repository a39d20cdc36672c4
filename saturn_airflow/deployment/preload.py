"""What the tasks of a worker would each import anew, imported once.

Workers load this module when their configuration says so:
``[celery] extra_celery_config = {"imports": ["saturn_airflow.deployment.preload"]}``. Celery's pool and
Airflow's tasks are forks of the worker's main process, so that they find these modules there, and share the
memory they take. Nothing here imports torch: what Airflow forks must never meet CUDA.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from airflow.sdk import conf
from celery.signals import celeryd_after_setup


@celeryd_after_setup.connect  # type: ignore[untyped-decorator]
def preload(instance: Any, **_: Any) -> None:
    """Import what tasks need: before the worker forks its pool, and after it took over from a killed one
    (``taking_over.py``), which others wait for.

    :param instance: the worker; where it runs tasks that no queue was chosen for, it plans.
    """
    import saturn_airflow.launch.followers
    import saturn_airflow.launch.leases
    import saturn_airflow.launch.past_runs
    import saturn_airflow.launch.restarting
    import saturn_airflow.launch.runs
    import saturn_airflow.operators.sweep  # noqa: F401
    from saturn_airflow.operators import airflow_internals
    from saturn_airflow.tracking.server import import_mlflow

    import_mlflow()
    with contextlib.suppress(ImportError):
        airflow_internals.import_for_tasks()
    with contextlib.suppress(ImportError, AttributeError):
        airflow_internals.see_ends_at_once()
    if conf.get_mandatory_value("operators", "default_queue") in instance.app.amqp.queues.consume_from:
        from saturn_airflow.planning import warming

        warming.import_all()
    # A collection in a fork would write into every page of these, which is then shared no more.
    gc.freeze()
