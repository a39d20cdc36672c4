"""A training step that does more on one device than on another."""

from typing import Any

import torch
from own_step_jobs import Coupled
from torch.nn import functional


class Skipping(Coupled):
    """Leaves batches out whose loss is large, which each device finds of its own samples."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.optimizer = super().configure_optimizers()
        return self.optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        if loss < 1.0:
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return loss
