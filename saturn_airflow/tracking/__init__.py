"""MLflow: runs, estimates, history. The only package that imports it, and only once it is needed.

Nothing here waits for MLflow while a job trains: records are appended to a file in the job's folder, and
sent from there in order, now or whenever MLflow answers again.
"""

from saturn_airflow.tracking import estimate_store
from saturn_airflow.tracking.mlflow_runs import JobRun, SweepRun
from saturn_airflow.tracking.opening_runs import open_job, open_sweep, reopen_job, reopen_sweep
from saturn_airflow.tracking.parameters import METRICS_TAG, job_params, job_tags
from saturn_airflow.tracking.sending import has_unsent, nobody_sends, send_outbox
from saturn_airflow.tracking.server import resolve_uri
from saturn_airflow.tracking.stopping import end_left_open, go_on, running_sweeps, stop_sweep

__all__ = [
    "METRICS_TAG",
    "JobRun",
    "SweepRun",
    "end_left_open",
    "estimate_store",
    "go_on",
    "has_unsent",
    "job_params",
    "job_tags",
    "nobody_sends",
    "open_job",
    "open_sweep",
    "reopen_job",
    "reopen_sweep",
    "resolve_uri",
    "running_sweeps",
    "send_outbox",
    "stop_sweep",
]
