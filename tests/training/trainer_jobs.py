"""Functions that return a ``Trainer`` of transformers, as people's scripts have them."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
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
        if self.augment:
            tokens = tokens.where(torch.rand(8) < 0.8, torch.from_numpy(np.random.randint(0, 32, 8)))
        return {"input_ids": tokens, "labels": (self.tokens[index, 0] % 2)}


COUNTS = {"read": 0}


class Counting(Rows):
    """Counts what is read of it, as an attribute or in a global variable."""

    def __init__(self, rows: int, globally: bool = False) -> None:
        super().__init__(rows)
        self.globally, self.read = globally, 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.globally:
            COUNTS["read"] += 1
        else:
            self.read += 1
        return super().__getitem__(index)


class Harder(Rows):
    """Has another label from the second epoch on, as a curriculum may."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {**row, "labels": self.tokens[index, self.epoch] % 2}


class Caching(Rows):
    """Opens what it reads from with the first sample, and keeps samples."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.opened, self.kept = None, {}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.opened = self.opened or object()
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class Clock(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at = time.perf_counter()


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


class Noting(TrainerCallback):
    """Counts where nothing is kept."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.heard = [object(), 1 + getattr(state, "heard", [None, 0])[1]]


class Weighing(Trainer):
    """Weighs the loss by how often it was called, from the seventh time on; transformers has an attribute of
    this name elsewhere."""

    global_step = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.global_step += 1
        loss = super().compute_loss(*args, **kwargs)
        return loss * 2 if self.global_step > 6 else loss


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


_CALLBACKS: dict[str, Any] = {"forgetful": Forgetful, "noting": Noting}
_DATA: dict[str, Any] = {
    "rows": lambda: Rows(22),
    "augmented": lambda: Rows(22, augment=True),
    "stream": Stream,
    "counting": lambda: Counting(22),
    "counting globally": lambda: Counting(22, globally=True),
    "caching": lambda: Caching(22),
    "harder": lambda: Harder(22),
}


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
    callbacks: list[TrainerCallback] = [_CALLBACKS[callback]()] if callback else []
    if patience:
        callbacks.append(EarlyStoppingCallback(patience))
    return Trainer(
        model=model,
        args=TrainingArguments(**{**known, **given, **arguments}),
        train_dataset=_DATA[data](),
        eval_dataset=Rows(10),
        compute_metrics=accuracy,
        data_collator=Masking() if collator else None,
        callbacks=callbacks,
    )


class Cutting(TrainerCallback):
    """Ends an epoch, or training, after a step; counts epochs' begins, drops more from each on, and clips
    gradients from the fourth step on."""

    def __init__(self, epoch_at: int = 0, all_at: int = 0) -> None:
        self.epoch_at, self.all_at = epoch_at, all_at
        self.begun = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1
        kwargs["model"].config.hidden_dropout_prob = 0.1 * self.begun
        kwargs["model"].dropout.p = 0.1 * self.begun

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == self.epoch_at
        control.should_training_stop = control.should_training_stop or state.global_step == self.all_at
        if state.global_step == 4:
            args.max_grad_norm = 0.01


def cutting(epoch_at: int = 0, all_at: int = 0, **arguments: Any) -> Trainer:
    made = trainer(**arguments)
    made.add_callback(Cutting(epoch_at, all_at))
    return made


def counting_functions(**arguments: Any) -> Trainer:
    """One whose schedule and whose loss count their calls; a callback of it writes down the time."""
    made = trainer(**arguments)
    calls = {"loss": 0, "rate": 0}

    def rate(step: int) -> float:
        calls["rate"] += 1
        return 1.0 if calls["rate"] < 5 else 0.1

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        calls["loss"] += 1
        weight = 2.0 if calls["loss"] > 6 else 1.0
        return weight * torch.nn.functional.cross_entropy(outputs.logits, labels)

    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-2)
    made.optimizer, made.lr_scheduler = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    made.compute_loss_func = loss
    made.add_callback(Clock())
    return made


class Telling(TrainerCallback):
    """Tells the loss of the epoch and of steps, by what it adds to arguments and state, and by a list."""

    def __init__(self, made: Any) -> None:
        self.trainer, self.steps, self.saves = made, made.steps, 0
        self.of_epochs: Counter[str] = Counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves += 1

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.weight = state.weight = 1 + round(state.epoch or 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        self.of_epochs[f"epoch {int(state.epoch)}"] += 1
        kwargs["optimizer"].param_groups[0]["weight_decay"] = 0.1 * max(self.of_epochs.values()) + self.saves


class Told(Trainer):
    """Weighs the loss by what it is told, and by the loss that it has logged last."""

    logged = 0.0

    def log(self, logs: dict[str, float], *args: Any) -> None:
        self.logged = logs.get("loss", self.logged)
        super().log(logs, *args)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        weight = self.args.weight + self.state.weight + self.logged  # type: ignore[attr-defined]
        steps: list[int] = self.steps  # type: ignore[attr-defined]
        return loss * (weight + sum(steps)) if len(steps) > 6 else loss


def telling(**arguments: Any) -> Trainer:
    """One whose loss follows, later than a trial sees, from what no checkpoint of a Trainer has."""
    counted = {"steps": 0}

    class Local(Told):
        counted = 0

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            counted["steps"] += 1
            Local.counted += 1
            loss = super().training_step(*args, **kwargs)
            return loss * (1 + (counted["steps"] == 8) + (Local.counted == 9))

    made = trainer(**arguments, logging_steps=3)
    made.__class__ = Local
    made.steps = []  # type: ignore[attr-defined]
    made.add_callback(Telling(made))
    return made


class SavesFew(Trainer):
    """Saves parameters alone, and none of the buffers."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        os.makedirs(output_dir, exist_ok=True)
        torch.save(dict(self.model.named_parameters()), f"{output_dir}/few.bin")  # type: ignore[union-attr]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        few = torch.load(f"{resume_from_checkpoint}/few.bin", weights_only=False)
        self.model.load_state_dict(few, strict=False)  # type: ignore[union-attr]


class CountingHead(torch.nn.Linear):
    """Doubles what it gives from the seventh time on."""

    def __init__(self) -> None:
        super().__init__(16, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(given) * (2 if self.seen > 6 else 1)


def saving_few(**arguments: Any) -> Trainer:
    made = trainer(**arguments, eval_strategy="no")
    made.__class__ = SavesFew
    made.model.classifier = CountingHead()  # type: ignore[union-attr]
    return made


class TestsToo(Trainer):
    """Evaluates more data than are asked for."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        found = super().evaluate(*args, **kwargs)
        super().evaluate(Rows(6), metric_key_prefix="test")
        return found


def testing_too(two: bool, **arguments: Any) -> Trainer:
    """One that evaluates one set of data or two, and another of its own."""
    made = trainer(**arguments)
    made.__class__ = TestsToo
    if two:
        made.eval_dataset = {"one": Rows(10), "other": Rows(8)}
    return made


class Resetting(TrainerCallback):
    """Draws the last layer anew before each epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].classifier.reset_parameters()


def resetting(**arguments: Any) -> Trainer:
    made = trainer(**arguments)
    made.add_callback(Resetting())
    return made


class Images(Rows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {"pixel_values": row["input_ids"].repeat(3, 8, 1) / 32, "labels": row["labels"]}


def of_images(**arguments: Any) -> Trainer:
    """A model that transformers writes under other names than its own."""
    set_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=2, **sizes))
    known = {"use_cpu": True, "save_strategy": "no", "num_train_epochs": 3, "learning_rate": 1e-2}
    args = TrainingArguments(**{**known, "per_device_train_batch_size": 4, **arguments})
    return Trainer(model=model, args=args, train_dataset=Images(22), eval_dataset=Images(10))
