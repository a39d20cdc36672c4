"""LightningModules beside Lightning's own Trainer, on the same batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from test_loop import launch, request
from test_own_step import off, train_unrefused

from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.own_step import metric_objects

pytestmark = pytest.mark.ranks

EPOCHS = 3


def job(model: str, *, evaluated: bool = True) -> Job:
    return Job(
        model.lower(),
        load_model=f"lightning_jobs:{model}",
        load_dataloader="lightning_jobs:rows",
        load_eval_dataloader="lightning_jobs:rows" if evaluated else None,
        own_step=True,
        hparams=HParams(epochs=EPOCHS, precision="float64"),
    )


def test_trains_as_lightnings_trainer_does(tmp_path: Path) -> None:
    import lightning_jobs

    jobs = [job("Classifier"), job("Frozen"), job("GAN", evaluated=False)]
    alone = [request(one, tmp_path / f"single-{one.name}", batch_count=7) for one in jobs]
    assert {told["result"]["status"] for told in launch(alone)[0]} == {"stopped"}
    # From the checkpoint of one device, on two.
    both = [request(one, tmp_path / f"single-{one.name}", "ddp") for one in jobs]
    told = launch(both, 2)[0]
    for one, result in zip(jobs, told, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, trainer = lightning_jobs.fitted(
                {"classifier": "Classifier", "frozen": "Frozen", "gan": "GAN"}[one.name], EPOCHS
            )
        assert off(tmp_path / f"single-{one.name}", model) < 1e-11
        if one.name != "gan":
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val")}
            assert result["result"]["metrics"] == pytest.approx(metrics, abs=1e-12)
            assert result["result"]["eval_loss"] == pytest.approx(metrics["val_loss"], abs=1e-12)


def test_metric_objects_come_to_what_they_do_under_lightnings_trainer(tmp_path: Path) -> None:
    import lightning_jobs

    one = job("Measured")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, trainer = lightning_jobs.fitted("Measured", EPOCHS)
    expected = {name: float(value) for name, value in trainer.callback_metrics.items()}
    of_step, of_epoch = {"train_loss", "of_step", "sum_step"}, {"fit_MeanSquaredError", "r2_of_epoch"}
    # In the middle of the second epoch, after a checkpoint of one device, on two.
    moved = tmp_path / "moved"
    assert launch([request(one, moved, batch_count=8)])[0][0]["result"]["status"] == "stopped"
    for folder, technique in ((tmp_path / "single", "single"), (tmp_path / "ddp", "ddp"), (moved, "ddp")):
        told = launch([request(one, folder, technique)], 2 if technique == "ddp" else 1)[0][0]
        assert "error" not in told, told
        last = [event for event in told["events"] if event["event"] == "step"][-1]["metrics"]
        assert last == pytest.approx({name: expected[name] for name in of_step}, rel=1e-5)
        found = told["result"]["metrics"]
        assert of_epoch | {"sum_epoch", "val_MeanAbsoluteError", "val_median", "val_best"} <= found.keys()
        assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-5)
        assert told["result"]["eval_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)


class AnswersToAnyName(torch.nn.Linear):
    """As diffusers' models do, whose configurations are dictionaries."""

    def __getattr__(self, name: str) -> Any:
        if name == "update":
            raise KeyError(name)
        return super().__getattr__(name)


def test_no_module_is_asked_whether_it_is_a_metric() -> None:
    model = torch.nn.Sequential(AnswersToAnyName(1, 1), torchmetrics.MeanMetric())
    found = metric_objects.MetricObjects(model, 2)
    assert found
    assert not metric_objects.is_metric(model[0])
    assert metric_objects.is_metric(model[1])


def test_a_metric_of_what_is_no_row_is_for_one_device(tmp_path: Path) -> None:
    means = job("MeasuredByMeans", evaluated=False)
    (alone,) = launch([request(means, tmp_path)])[0]
    assert alone["result"]["metrics"]["mean_loss"] == pytest.approx(alone["result"]["epoch_loss"])
    (both,) = launch([request(means, technique="ddp")], 2)[0]
    assert both["error"] == "DoesNotFit"
    assert "the metric 'mean' is updated with a number" in both["says"]
    (without,) = ranks_module.launch(train_unrefused, [request(means, technique="ddp")], size=2)[0]
    result = without["result"]
    assert abs(result["metrics"]["mean_loss"] - result["epoch_loss"]) > 1e-3, "what is refused would be right"


def test_what_is_not_honoured_is_refused_by_name() -> None:
    refused = {
        "Setting": "with setup, which Saturn does not call; do it in load_model",
        "Asking": "self.trainer.datamodule is Lightning's",
        "LoggingEpochs": "self.log('train_loss', on_epoch=True) in training_step",
        "Uncalled": "has no value of this batch: call it itself, not its update",
        "Hidden": "a MeanMetric that is no part of the model",
        "Gathering": "self.all_gather is Lightning's",
        "transformers_trainer": "returned a Trainer, which trains by itself; say Job(trainer=True)",
    }
    told = launch([request(job(name)) for name in refused])[0]
    for (name, says), one in zip(refused.items(), told, strict=True):
        assert one["error"] == "JobError", name
        assert says in one["says"]
