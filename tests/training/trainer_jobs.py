"""Functions that return a ``Trainer`` of transformers, as people's scripts have them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Rows(Dataset):
    """Sequences whose first token says their label."""

    def __init__(self, rows: int, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.tokens = torch.randint(0, 32, (rows, 8), generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        if self.augment and random.random() < 0.5:
            tokens = tokens.flip(0)
        return {"input_ids": tokens, "labels": (self.tokens[index, 0] % 2)}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(Rows(24))


class Masking:
    """A collator with a generator of its own, as DataCollatorForLanguageModeling(seed=) has."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        masked = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.3
        return {**batch, "input_ids": batch["input_ids"].masked_fill(masked, 0)}


class Forgetful(TrainerCallback):
    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.add(state.global_step)


class Weighing(Trainer):
    """Weighs the loss by how often it was called, from the seventh time on."""

    calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        loss = super().compute_loss(*args, **kwargs)
        return loss * 2 if self.calls > 6 else loss


class Freezing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            kwargs["model"].bert.embeddings.requires_grad_(False)
            kwargs["model"].dropout.p = 0.5


def changing(**arguments: Any) -> Trainer:
    """One whose class, and whose callback, change what its own checkpoints lack."""
    made = trainer(**arguments)
    made.__class__ = Weighing
    made.add_callback(Freezing())
    return made


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def trainer(
    data: str = "rows", collator: str = "", callback: str = "", patience: int = 0, **arguments: Any
) -> Trainer:
    set_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    known = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
    }
    given = {"use_cpu": True, "eval_strategy": "epoch", "save_strategy": "no", "logging_steps": 2}
    callbacks: list[TrainerCallback] = [Forgetful()] if callback else []
    if patience:
        callbacks.append(EarlyStoppingCallback(patience))
    return Trainer(
        model=model,
        args=TrainingArguments(**{**known, **given, **arguments}),
        train_dataset={"rows": Rows(22), "augmented": Rows(22, augment=True), "stream": Stream()}[data],
        eval_dataset=Rows(10),
        compute_metrics=accuracy,
        data_collator=Masking() if collator else None,
        callbacks=callbacks,
    )
