"""The jobs of benchmarks/paper.py as trials of Ray Tune, with a fixed number of devices each.

    python ray_queue.py DEVICES JOBS.json RESULT.json

Runs in an environment of its own. A device is a resource of Ray's; a trial sleeps as long as its job would
train.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune


def train(config: dict[str, Any]) -> None:
    """Sleep through one job."""
    began = time.time()
    time.sleep(config["job"]["seconds"])
    tune.report({"began": began, "ended": time.time()})


def main() -> None:
    """Run all trials, and write when each trained."""
    devices, jobs = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    # Cores are no limit to what sleeps.
    ray.init(num_cpus=devices, resources={"device": devices}, include_dashboard=False, log_to_driver=False)
    tuner = tune.Tuner(
        tune.with_resources(train, lambda config: {"cpu": 1, "device": config["job"]["devices"]}),
        param_space={"job": tune.grid_search(jobs)},
        run_config=tune.RunConfig(
            storage_path=str(Path(sys.argv[3]).parent / "ray"),
            verbose=0,
            failure_config=tune.FailureConfig(fail_fast=True),
        ),
    )
    began = time.time()
    found = [
        {
            "name": trial.config["job"]["name"],
            "devices": trial.config["job"]["devices"],
            "began": trial.metrics["began"],
            "ended": trial.metrics["ended"],
        }
        for trial in tuner.fit()
    ]
    Path(sys.argv[3]).write_text(json.dumps({"began": began, "jobs": found}))
    ray.shutdown()


if __name__ == "__main__":
    main()
