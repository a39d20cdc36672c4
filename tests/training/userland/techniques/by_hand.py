"""A user's technique that trains on Saturn's ranks by a loop of its own, in epochs, and saves as it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from saturn_airflow import BaseTechnique
from saturn_airflow.model import references
from saturn_airflow.model.jobs import Job


class ByHand(BaseTechnique):
    def search(self, job: Any, devices: Any, session: Any) -> tuple[dict[str, Any], float]:
        return {}, 0.5

    def execute(
        self, job: Any, devices: Any, session: Any, parameters: Any, batch_count: int | None = None
    ) -> None:
        session.launch(train, job.to_dict(), str(session.folder), batch_count)
        if parameters.get("exports", True):
            session.export(torch.load(session.folder / "by_hand.pt")["model"])


def train(job_data: Any, folder: str, batch_count: int | None, ranks: Any) -> None:
    job, file = Job.from_dict(job_data), Path(folder, "by_hand.pt")
    model = references.load(job.load_model)(**job.model_args)
    loss_function = references.load(job.loss_function)
    data = references.load(job.load_dataloader)(**job.data_args)
    shares = DataLoader(
        data.dataset, data.batch_size // ranks.size, sampler=DistributedSampler(data.dataset, shuffle=False)
    )
    done = 0
    if file.exists():
        kept = torch.load(file)
        model.load_state_dict(kept["model"])
        done = kept["done"]
    ranks.barrier()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.hparams.lr)
    total = job.hparams.batches or job.hparams.epochs * len(shares)
    end = total if batch_count is None else min(total, done + batch_count)
    stop = False
    while done < end and not stop:
        for number, (inputs, targets) in enumerate(shares):
            if number < done % len(shares):
                continue
            loss = loss_function(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            epoch = (done - 1) // len(shares)
            ranks.emit("step", step=done, loss=float(whole) / ranks.size, epoch=epoch)
            stop = ranks.any(ranks.stop_requested())
            if stop or done >= end:
                break
    if ranks.is_first:
        torch.save({"model": model.state_dict(), "done": done}, file)
