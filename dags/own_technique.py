"""A sweep whose jobs are trained by a technique of the user's own.

The technique is the file `shop/techniques/half_gradients.py`; the sweep knows it by the name of the file.
Airflow's setting `[saturn] techniques_folder` names the folder, on the scheduler's machine as on the nodes.
"""

from __future__ import annotations

from airflow.sdk import dag

from saturn_airflow import Cluster, HParams, Job, Node, SaturnSweepOperator, grid


@dag(schedule=None, catchup=False, max_active_runs=1, tags=["saturn"], doc_md=__doc__)
def own_technique() -> None:
    """Two jobs, on as many devices each as is best."""
    SaturnSweepOperator(
        task_id="sweep",
        jobs=grid(
            Job(
                "gpt2-lr{lr}",
                load_model="shop.models:gpt2",
                load_dataloader="shop.data:python_text",
                loss_function="shop.models:lm_loss",
                model_args={"n_layer": 2, "n_embd": 64},
                data_args={"samples": 512},
                hparams=HParams(epochs=1, batch_size=32),
                # Its gradients are not quite those of one device: without this the trial refuses it.
                trust=["half_gradients"],
            ),
            lr=[1e-3, 3e-3],
        ),
        techniques=["half_gradients"],
        cluster=Cluster(Node("local", devices=2, kind="cpu")),
    )


own_technique()
