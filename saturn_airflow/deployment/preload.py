"""What the tasks of a Celery worker would each import anew, imported once.

Workers load this module when their configuration says so:
``[celery] extra_celery_config = {"imports": ["saturn_airflow.deployment.preload"]}``. Celery's pool and
Airflow's tasks are forks of the worker's main process, so that they find these modules there, and share the
memory they take.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import conf
from celery.signals import celeryd_after_setup


@celeryd_after_setup.connect  # type: ignore[untyped-decorator]
def preload(instance: Any, **_: Any) -> None:
    """Import what tasks need: before the worker forks its pool, and after it took over from a killed one
    (``taking_over.py``), which others wait for.

    :param instance: the worker; where it runs tasks that no queue was chosen for, it plans.
    """
    from saturn_airflow.deployment import task_imports

    queues = instance.app.amqp.queues.consume_from
    task_imports.import_all(plans=conf.get_mandatory_value("operators", "default_queue") in queues)
