"""The jobs of benchmarks/sweep.py as trials of Ray Tune, one CPU each, by its documentation.

    python ray_trials.py JOBS.json RESULT.json [--reuse-actors]

With the last, Ray's processes train one trial after another; else each trial has a new process. Runs in an
environment of its own, which has Ray, torch and what the models need, and nothing of Saturn's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from plain_loop import train as train_plainly
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


def train(config: dict[str, Any]) -> None:
    """Train one job."""
    tune.report(train_plainly(config["job"]))


def main() -> None:
    """Run all trials and write when each ran, and its losses."""
    jobs, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    clock = Clock()
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"job": tune.grid_search(jobs)},
        tune_config=tune.TuneConfig(reuse_actors="--reuse-actors" in sys.argv),
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
