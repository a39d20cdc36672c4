"""Trainers whose data, or modules, are not what they seem to a trial."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import trainer_jobs
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import Trainer, TrainerCallback, default_data_collator, set_seed
from transformers.trainer_pt_utils import LabelSmoother

SIZE = 4
#: The step after which something changes, of six in an epoch.
LATE = 5


class Drawn(SequentialSampler):
    """Goes by the name of an order that it does not have."""

    def __init__(self, data: Any, how: str) -> None:
        super().__init__(data)
        self.how, self.epoch, self.times = how, 0, 0
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[int]:
        count = len(self.data_source)
        self.times += 1
        orders: Any = {
            "torch": lambda: torch.randperm(count).tolist(),
            "numpy": lambda: np.random.permutation(count).tolist(),
            "python": lambda: random.sample(range(count), count),
            "generator": lambda: torch.randperm(count, generator=self.generator).tolist(),
            "times": lambda: np.random.default_rng(self.times).permutation(count).tolist(),
            "epoch": lambda: np.random.default_rng(self.epoch).permutation(count).tolist(),
        }
        return iter(orders[self.how]())


class DrawnByEpoch(Drawn):
    """Is told of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Let the order be that of ``epoch``."""
        self.epoch = epoch


class DrawnBatches(BatchSampler):
    """Draws the order in place of the sampler that it has."""

    def __init__(self, data: Any, how: str) -> None:
        super().__init__(SequentialSampler(data), SIZE, False)
        self.drawn = DrawnByEpoch(data, how)

    def set_epoch(self, epoch: int) -> None:
        """Let the order be that of ``epoch``."""
        self.drawn.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.drawn)
        return iter([order[first : first + SIZE] for first in range(0, len(order), SIZE)])


class Ordering(Trainer):
    """Makes its own data loader."""

    how, batches = "", False

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As people override it."""
        data: Any = self.train_dataset
        given: Any = {"batch_size": SIZE, "sampler": DrawnByEpoch(data, self.how)}
        if self.batches:
            given = {"batch_sampler": DrawnBatches(data, self.how)}
        loader = DataLoader(data, collate_fn=default_data_collator, **given)
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]


def ordering(how: str, batches: bool, output_dir: str | None = None) -> Trainer:
    """A trainer whose batches come in this order."""
    set_seed(1)
    folder: Any = {"output_dir": output_dir} if output_dir else {}
    made = trainer_jobs.trainer(**folder)
    own = Ordering(
        model=made.model, args=made.args, train_dataset=made.train_dataset, eval_dataset=made.eval_dataset
    )
    own.how, own.batches = how, batches
    return own


class Halving(TrainerCallback):
    """Halves gradients."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        for parameter in kwargs["model"].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Held:
    """What a callback holds."""

    place: object = None


class Changing(TrainerCallback):
    """Changes something at a later step."""

    trainer: Trainer

    def __init__(self, what: str) -> None:
        self.what, self.held = what, Held()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        if self.what == "collator":
            COLLATOR.set_epoch(math.ceil(state.epoch))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        if state.global_step != LATE:
            return
        data, model = kwargs["train_dataloader"].dataset, kwargs["model"]
        if self.what in ("data", "told data"):
            data.tokens = data.tokens.flip(1)
        elif self.what == "module":
            model.classifier = torch.nn.Linear(16, 2)
        elif self.what == "hook":
            model.classifier.register_forward_hook(lambda module, given, found: found * 1.5)
        elif self.what == "gradient hook":
            model.classifier.weight.register_hook(lambda gradient: gradient * 0.5)
        elif self.what == "function":
            forward = model.classifier.forward
            model.classifier.forward = lambda given: forward(given) * 1.5
        elif self.what == "sampler":
            kwargs["train_dataloader"].batch_sampler.sampler.weights[:12] = 0.0
        elif self.what == "schedule":
            self.trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(kwargs["optimizer"], 0.5)  # type: ignore[assignment]
        elif self.what == "loss":
            self.trainer.compute_loss_func = lambda outputs, labels, **kwargs: outputs.logits.square().mean()
        elif self.what == "label smoothing":
            self.trainer.label_smoother.epsilon = 0.5  # type: ignore[union-attr]
        elif self.what == "optimizer":
            embeddings = list(model.bert.embeddings.parameters())
            for parameter in embeddings:
                parameter.requires_grad_(True)
            kwargs["optimizer"].add_param_group({"params": embeddings, "lr": 0.1})
        elif self.what == "object":
            self.held.place = object()
            kwargs["optimizer"].param_groups[0]["weight_decay"] = 0.5
        elif self.what == "callback":
            self.trainer.add_callback(Halving())


class Told(trainer_jobs.Rows):
    """Has an attribute that follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Note ``epoch``."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "labels": self.tokens[index, self.epoch % 8] % 2}


class ToldOnce(Told):
    """Counts how often it is told."""

    times = 0

    def set_epoch(self, epoch: int) -> None:
        """Be told."""
        super().set_epoch(self.times)
        self.times += 1


class Weighted(DrawnByEpoch):
    """Draws by weights that a callback may change."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, "epoch")
        self.weights = torch.ones(len(data))

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.multinomial(self.weights, len(self.weights), True, generator=generator).tolist())


class Turning:
    """A collator that is told of epochs by a callback of the job's alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Note ``epoch``."""
        self.epoch = epoch

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Turn the tokens by the epoch."""
        batch = default_data_collator(rows)
        return {**batch, "input_ids": batch["input_ids"].roll(self.epoch, 1)}


COLLATOR = Turning()


class Weighing(Ordering):
    """Draws by weights."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As people override it."""
        data: Any = self.train_dataset
        loader = DataLoader(data, batch_size=SIZE, collate_fn=default_data_collator, sampler=Weighted(data))
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]


def changing(what: str, output_dir: str | None = None, **arguments: Any) -> Trainer:
    """A trainer that changes, after the steps of a trial, what no checkpoint of its has."""
    folder: Any = {"output_dir": output_dir} if output_dir else {}
    made = trainer_jobs.trainer(**folder, **arguments)
    if what == "told data":
        made.train_dataset = Told(22)
    elif what == "sampler":
        made.__class__ = Weighing
    elif what == "collator":
        COLLATOR.set_epoch(0)
        made.data_collator = COLLATOR
    elif what == "label smoothing":
        made.label_smoother = LabelSmoother(0.1)
    elif what == "optimizer":
        made.model.bert.embeddings.requires_grad_(False)  # type: ignore[union-attr]
        rest = made.model.classifier.parameters()  # type: ignore[union-attr]
        made.optimizer = torch.optim.AdamW(rest, lr=1e-2)
        made.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(made.optimizer)  # type: ignore[assignment]
    changes = Changing(what)
    changes.trainer = made
    made.add_callback(changes)
    return made


def told_once() -> Trainer:
    """A trainer whose data follow from how often they were told of an epoch."""
    made = trainer_jobs.trainer()
    made.train_dataset = ToldOnce(22)
    return made


def unchanging(how: str) -> Trainer:
    """A trainer that changes nothing but what each process makes, or what it is told."""
    made = trainer_jobs.trainer(eval_strategy="no")
    if how == "told data":
        made.train_dataset = Told(22)
    else:
        made.model.config.output_hidden_states = True  # type: ignore[union-attr]
    return made
