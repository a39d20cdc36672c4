"""The jobs of benchmarks/sweep.py as trials of Ray Tune, one CPU each, by its documentation.

    python ray_trials.py JOBS.json RESULT.json

Runs in an environment of its own, which has Ray, torch and what the models need, and nothing of Saturn's. The
training loop is the plain one that a practitioner writes: the same models, batches, optimizers, evaluations.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune

CPUS = 2


class Clock(tune.Callback):  # type: ignore[misc]
    """When each trial was started and done, in seconds since the epoch."""

    def __init__(self) -> None:
        self.started: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.started[trial.config["job"]["name"]] = time.time()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.ended[trial.config["job"]["name"]] = time.time()


def named(reference: str) -> Any:
    """What ``"module:name"`` stands for."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def train(config: dict[str, Any]) -> None:
    """Train one job."""
    import torch

    torch.set_num_threads(1)
    job, hparams = config["job"], config["job"]["hparams"]
    torch.manual_seed(0)
    model = named(job["load_model"])(**job["model_args"])
    data, evaluation = (
        named(job[name])(**job.get("data_args", {}), batch_size=hparams["batch_size"])
        for name in ("load_dataloader", "load_eval_dataloader")
    )
    loss_of = named(job["loss_function"])

    def mean_loss(batch: dict[str, Any]) -> Any:
        found = loss_of(model(**{key: value for key, value in batch.items() if key != "labels"}), batch)
        return found[0] / found[1] if isinstance(found, tuple) else found

    optimizer = torch.optim.AdamW(model.parameters(), lr=hparams.get("lr", 1e-3), fused=True)
    seconds, batches = 0.0, 0
    for _ in range(hparams["epochs"]):
        model.train()
        began = time.perf_counter()
        for batch in data:
            loss = mean_loss(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds, batches = seconds + time.perf_counter() - began, batches + len(data)
        model.eval()
        with torch.no_grad():
            eval_loss = sum(float(mean_loss(batch)) for batch in evaluation) / len(evaluation)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "trained.pt")
    tune.report({"seconds_per_batch": seconds / batches, "eval_loss": eval_loss})


def main() -> None:
    """Run all trials and write when each ran, and its losses."""
    jobs, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    clock = Clock()
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"job": tune.grid_search(jobs)},
        run_config=tune.RunConfig(
            storage_path=str(result.parent / "ray"),
            verbose=0,
            callbacks=[clock],
            failure_config=tune.FailureConfig(fail_fast=True),
        ),
    )
    found = [
        {
            "job": trial.config["job"]["name"],
            "technique": "plain",
            "devices": 1,
            "started_at": clock.started[trial.config["job"]["name"]],
            "ended_at": clock.ended[trial.config["job"]["name"]],
            "seconds_per_batch": trial.metrics["seconds_per_batch"],
            "eval_loss": trial.metrics["eval_loss"],
        }
        for trial in tuner.fit()
    ]
    result.write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
