"""Data whose later samples come only when a file is there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 2048
#: Far more than a trial sees of data this slow: it counts batches for at most three seconds.
GATE = 1600


class _Gated(TensorDataset):
    fetched = 0

    def __getitem__(self, index):
        time.sleep(0.004)
        self.fetched += 1
        while self.fetched >= GATE and not Path(os.environ["SATURN_TEST_GATE"]).exists():
            time.sleep(0.05)
        return super().__getitem__(index)


def points(batch_size: int) -> DataLoader:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(_Gated(inputs, (inputs[:, 0] > 0).long()), batch_size=batch_size)
