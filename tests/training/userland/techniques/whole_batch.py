"""A user's technique that has nothing but search and execute, and trains in this one process."""

from __future__ import annotations

import time
from typing import Any

import torch

from saturn_airflow import BaseTechnique
from saturn_airflow.model import references


class WholeBatch(BaseTechnique):
    def search(self, job: Any, devices: Any, session: Any) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        self._steps(job, session, 3)
        return {"found": True}, (time.perf_counter() - started) / 3

    def execute(
        self, job: Any, devices: Any, session: Any, parameters: Any, batch_count: int | None = None
    ) -> None:
        assert parameters == {"found": True}
        state = self._steps(job, session, batch_count or job.hparams.batches)
        torch.save(state, session.folder / "model.pt")
        session.export(state)

    def _steps(self, job: Any, session: Any, count: int) -> dict[str, Any]:
        model = references.load(job.load_model)(**job.model_args)
        loss_function = references.load(job.loss_function)
        optimizer = torch.optim.SGD(model.parameters(), lr=job.hparams.lr)
        data = iter(references.load(job.load_dataloader)(**job.data_args))
        for step in range(1, count + 1):
            inputs, targets = next(data)
            loss = loss_function(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.emit("step", step=step, loss=loss.item())
            if session.stop_requested():
                break
        return dict(model.state_dict())
