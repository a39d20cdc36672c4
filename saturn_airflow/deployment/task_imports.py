"""What the tasks of sweeps would each import anew, imported once in the process that they are forked from.

Nothing here imports torch: what Airflow forks must never meet CUDA.
"""

from __future__ import annotations

import contextlib
import gc


def import_all(plans: bool) -> None:
    """Import it.

    :param plans: whether tasks that plan are forked from this process, too.
    """
    import saturn_airflow.launch.checkpoint_budget
    import saturn_airflow.launch.followers
    import saturn_airflow.launch.leases
    import saturn_airflow.launch.past_runs
    import saturn_airflow.launch.restarting
    import saturn_airflow.launch.runs
    import saturn_airflow.operators.sweep  # noqa: F401
    from saturn_airflow import library
    from saturn_airflow.model.errors import InvalidSweepError
    from saturn_airflow.operators import airflow_internals
    from saturn_airflow.tracking.server import import_mlflow

    import_mlflow()
    with contextlib.suppress(ImportError):  # MLflow would with its first request
        import mlflow.tracking.request_header.registry  # noqa: F401
    with contextlib.suppress(InvalidSweepError):  # which its sweeps are told
        library.names()
    with contextlib.suppress(ImportError):
        airflow_internals.import_for_tasks()
    with contextlib.suppress(ImportError, AttributeError):
        airflow_internals.see_ends_at_once()
    if plans:
        from saturn_airflow.planning import warming

        warming.import_all()
    # A collection in a fork would write into every page of these, which is then shared no more.
    gc.freeze()
