"""A sweep whose jobs are known only at run time: one model for each corpus that a task finds."""

from __future__ import annotations

from typing import Any

from airflow.sdk import dag, task

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator


@dag(schedule="@daily", catchup=False, max_active_runs=1, tags=["saturn"], doc_md=__doc__)
def jobs_from_upstream() -> None:
    """A task that makes jobs, and a sweep that trains them."""

    @task
    def jobs_of_today() -> list[dict[str, Any]]:
        """A job for each of Python's packages with enough text; elsewhere: for each shop with new sales."""
        from shop.data import packages_with_text

        made = [
            Job(
                f"gpt2 on {package}",
                load_model="shop.models:gpt2",
                load_dataloader="shop.data:package_text",
                loss_function="shop.models:lm_loss",
                data_args={"package": package, "samples": 512},
                hparams=HParams(epochs=1, batch_size=32, lr=3e-3),
                # No corpus trains faster than another: what is measured once holds for all.
                neutral=["package"],
            )
            for package in packages_with_text(least_bytes=512 * 64)[:3]
        ]
        return [job.to_dict() for job in made]

    SaturnSweepOperator(
        task_id="sweep",
        jobs=jobs_of_today(),
        techniques=["single"],
        cluster=Cluster(Node("local", devices=2, kind="cpu")),
    )


jobs_from_upstream()
