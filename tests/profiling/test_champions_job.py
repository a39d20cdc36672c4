"""What of a job the champion is scored by."""

from __future__ import annotations

from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.profiling import scoring_earlier


def test_the_champion_is_scored_on_the_same_data_as_the_best_job() -> None:
    """A ``load_eval_dataloader`` that splits its data at random splits them by the job's seed."""
    best = Job(
        "best",
        load_model="shop:model",
        load_dataloader="shop:train",
        load_eval_dataloader="shop:held_out",
        loss_function="shop:loss",
        data_args={"day": "2026-11-22"},
        hparams=HParams(seed=7, batch_size=32, lr=0.5),
    )
    champion = Job(
        "old", load_model="shop:old_model", load_dataloader="shop:train", loss_function="shop:loss"
    )
    scored = scoring_earlier.job_of(champion, best, "models:/shop/3")
    assert (scored.hparams.seed, scored.hparams.batch_size) == (7, 32)
    assert (scored.load_eval_dataloader, scored.data_args) == (best.load_eval_dataloader, best.data_args)
    assert (scored.load_model, scored.init_from) == (champion.load_model, "models:/shop/3")
