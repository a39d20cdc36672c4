"""A job that is right, for tests of what is around it."""

from __future__ import annotations

from saturn_airflow.model.jobs import HParams, Job

ANY_JOB = Job(
    "a",
    "torch.nn:Linear",
    "torch.utils.data:DataLoader",
    model_args={"in_features": 1, "out_features": 1},
    data_args={"dataset": []},
    hparams=HParams(epochs=1),
)
