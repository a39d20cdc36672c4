"""A job whose code logs with MLflow, in the ways in which people do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import mlflow
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import saturn_airflow


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        outputs: torch.Tensor = self.head(inputs)
        return outputs


def model() -> nn.Module:
    mlflow.set_tracking_uri("http://127.0.0.1:9")  # nobody is there
    mlflow.set_experiment("their own experiment")
    with mlflow.start_run(run_name="their run", tags={"owner": "ada"}) as run:
        mlflow.log_params({"layers": 4, "lr": "as written"})
        mlflow.log_metric("set_up", 1.0)
        made = _Blocks()
        mlflow.log_text(str(made), "model.txt")
        mlflow.log_dict({"rows": 40}, "about/data.json")
        with mlflow.start_run(nested=True, run_name="inner"):
            mlflow.set_tag("inner", "yes")
    active = mlflow.active_run()
    assert active is not None
    assert active.info.run_id == run.info.run_id
    return made


class _Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        # What the processes that fetch samples log is logged by none of them.
        if os.environ.get("SATURN_TEST_LOGS_IN_WORKERS"):
            mlflow.log_metric("fetched", index)
        return self.inputs[index], self.inputs[index].sum(-1, keepdim=True)


def rows(batch_size: int = 8, workers: int = 0, kill_at: str = "") -> DataLoader[Any]:
    os.environ["SATURN_TEST_KILL_AT"] = kill_at
    return DataLoader(_Rows(), batch_size=batch_size, num_workers=workers)


def loss(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    value = nn.functional.mse_loss(outputs, targets)
    step = saturn_airflow.current_step()
    mlflow.log_metric("bias", float(outputs.detach().mean()), step=step)
    mlflow.log_metrics({"loss": 1.0, "rows": float(len(outputs))}, step=step)
    if step == 5:
        mlflow.set_tag("half", "done")
        mlflow.log_text(f"at {step}", "half.txt")
    where, _, marker = os.environ["SATURN_TEST_KILL_AT"].partition(" ")
    if where and step == int(where) and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def with_log_model() -> nn.Module:
    made = _Blocks()
    mlflow.pytorch.log_model(made, name="mine")
    return made
