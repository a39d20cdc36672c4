"""A champion that is scored again on the data that it was evaluated on has the value that it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_loop import job as loop_job
from test_loop import launch, request
from test_own_step import job as own_job

from saturn_airflow.model.jobs import Job
from saturn_airflow.profiling.scoring_earlier import job_of
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.exports import export_model
from saturn_airflow.training.loop import score

pytestmark = pytest.mark.ranks

JOBS = {
    "of Saturn's loop": loop_job({"epochs": 2, "batch_size": 8}, load_eval_dataloader="loop_jobs:points"),
    "with a step of its own": own_job("GAN", load_eval_dataloader="own_step_jobs:rows"),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_same_data_give_the_same_value(tmp_path: Path, job: Job) -> None:
    ((told,),) = launch([request(job, tmp_path)])
    trained: dict[str, Any] = told["result"]
    model = export_model(trained["checkpoint"], job, tmp_path / "model")
    again = request(job_of(job, job, "models:/some/1"), initial_weights=str(model / "model.safetensors"))
    (found,) = ranks_module.launch(score, again, size=1)
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=1e-9)
    assert found["metrics"] == pytest.approx(trained["metrics"], rel=1e-9)
