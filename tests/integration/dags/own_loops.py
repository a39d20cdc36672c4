"""Jobs that bring their own training: a ``Trainer`` of transformers, and a ``LightningModule``."""

from __future__ import annotations

import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Rows(Dataset[Any]):
    """Sequences whose first token says their label, each a hundredth of a second."""

    def __init__(self, rows: int, seconds: float) -> None:
        self.tokens = torch.randint(0, 32, (rows, 8), generator=torch.Generator().manual_seed(rows))
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return {"input_ids": self.tokens[index], "labels": self.tokens[index, 0] % 2}


def trainer(seconds: float, output_dir: str = "unused") -> Trainer:
    set_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    arguments = TrainingArguments(
        output_dir,
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        eval_strategy="epoch",
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
    )
    return Trainer(
        model=BertForSequenceClassification(BertConfig(vocab_size=32, **sizes)),
        args=arguments,
        train_dataset=Rows(160, seconds),
        eval_dataset=Rows(16, 0.0),
    )


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch["input_ids"]), batch["labels"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch["input_ids"]), batch["labels"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(batch_size: int, seconds: float = 0.0) -> DataLoader[Any]:
    return DataLoader(Rows(160, seconds), batch_size=batch_size, shuffle=True)
