"""A job of benchmarks/sweep.py in the plain loop that a practitioner writes, with nothing of Saturn's.

    python plain_loop.py JOB.json RESULT.json

The same models, batches, optimizers and evaluations as a sweep has.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any


def named(reference: str) -> Any:
    """What ``"module:name"`` stands for."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def train(job: dict[str, Any]) -> dict[str, float]:
    """Train one job on this process's one thread; its mean seconds per batch and its last evaluation's loss.

    What was trained is written to the working folder.
    """
    import torch

    torch.set_num_threads(1)
    hparams = job["hparams"]
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
        began = perf_counter()
        for batch in data:
            loss = mean_loss(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds, batches = seconds + perf_counter() - began, batches + len(data)
        model.eval()
        with torch.no_grad():
            eval_loss = sum(float(mean_loss(batch)) for batch in evaluation) / len(evaluation)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "trained.pt")
    return {"seconds_per_batch": seconds / batches, "eval_loss": eval_loss}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(train(json.loads(Path(sys.argv[1]).read_text()))))
