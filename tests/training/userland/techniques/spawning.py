"""A user's technique that starts processes of its own in fresh interpreters, as executors on Ray did."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from saturn_airflow import BaseTechnique


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def write(rank: int, file: str) -> None:
    with open(f"{file}-{rank}", "w") as written:
        written.write("1")


class Spawning(BaseTechnique):
    def search(self, job: Any, devices: Any, session: Any) -> tuple[dict[str, Any], float]:
        return {}, 0.5

    def execute(
        self, job: Any, devices: Any, session: Any, parameters: Any, batch_count: int | None = None
    ) -> None:
        torch.multiprocessing.spawn(write, (str(session.folder / "spawned"),), nprocs=1)
        loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
        session.emit("step", step=1, loss=sum(float(batch) for batch in loader))
