"""Metrics of all kinds for the tests of evaluation, and the plain loop that says what they come to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import tiny
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks


def _tokens(outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    counted = labels != -100
    return ((logits.argmax(-1) == labels) & counted).sum(), counted.sum()


def token_accuracy(outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A pair: right tokens, and how many count; how many those are differs between samples."""
    return _tokens(outputs, batch)


def mean_by_tokens(outputs: Any, batch: Any) -> torch.Tensor:
    """A number that is no mean over samples, so that parts of a batch do not make up the whole."""
    right, counted = _tokens(outputs, batch)
    return right.double() / counted


def of_batch(outputs: Any, batch: Any) -> dict[str, Any]:
    """Several values, of which some couple the samples of a batch."""
    logits = outputs.logits.double()
    return {
        "spread": logits.mean((1, 2)).std(unbiased=False),
        "largest": (float(logits.max()), 1),
        "rows": len(logits),
    }


def false_pair(outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """A pair that does not add up: the mean of a batch, and 1."""
    return mean_by_tokens(outputs, batch), 1


def needs_two(outputs: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """A pair that can't be had of one sample alone."""
    if len(batch["labels"]) < 2:
        raise ValueError("one sample is too few")
    return _tokens(outputs, batch)  # type: ignore[return-value]


def likelihood(outputs: Any, batch: Any) -> torch.Tensor:
    """A number from one of torch's means, which must not be taken for one of the loss's."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return cross_entropy(logits.double(), labels, ignore_index=-100).exp()


class InOrder:
    """What was seen last counts most: it depends on the order of all batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value, self.updates = 0.0, 0

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        assert predictions.shape[:2] == targets.shape
        self.value = 0.7 * self.value + 0.3 * float(predictions.double().std())
        self.updates += 1

    def compute(self) -> dict[str, float]:
        return {"value": self.value, "updates": self.updates}


class Median(nn.Module):
    """Keeps all it saw, as torchmetrics' states with ``dist_reduce_fx="cat"`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def reset(self) -> None:
        self.seen = []

    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        self.seen.append(predictions.double().mean((1, 2)))

    def compute(self) -> torch.Tensor:
        return torch.cat(self.seen).median()


median = Median()


def untracked() -> nn.Module:
    """Its BatchNorm looks at the batch when it is evaluated, too."""
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 5))


def certainty(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float(outputs.softmax(-1).amax(-1).mean())


def two_means(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of two means over different things."""
    kept = outputs[targets > 1]
    return cross_entropy(outputs, targets) + 3 * mse_loss(kept, torch.ones_like(kept))


def held_out(samples: int = 26, batch_size: int = 6, **unused: Any) -> DataLoader[Any]:
    """Other samples than those trained on; the last batch is smaller."""
    return DataLoader(tiny.Rows(tiny.tokens(samples + 3).dataset.rows[3:]), batch_size=batch_size)  # type: ignore[attr-defined]


def held_out_stream(samples: int = 26, batch_size: int = 6, **unused: Any) -> Iterator[Any]:
    yield from held_out(samples, batch_size)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "token_accuracy": token_accuracy,
    "mean_by_tokens": mean_by_tokens,
    "of_batch": of_batch,
    "false_pair": false_pair,
    "needs_two": needs_two,
    "likelihood": likelihood,
}
OBJECTS: dict[str, Callable[[], Any]] = {"in_order": InOrder, "median": Median}


def plain(model: nn.Module, samples: int) -> dict[str, float]:
    """All metrics of ``model`` on the held-out data, in plain Python."""
    sums: dict[str, list[tuple[float, float]]] = {}
    objects = {name: make() for name, make in OBJECTS.items()}
    model.eval()
    with torch.no_grad():
        for batch in held_out(samples):
            outputs = model(input_ids=batch["input_ids"])
            for name, function in FUNCTIONS.items():
                value = function(outputs, batch)
                for key, one in value.items() if isinstance(value, dict) else [(None, value)]:
                    size = len(batch["labels"])
                    pair = one if isinstance(one, tuple) else (one * size, size)
                    whole = name if key is None else f"{name}/{key}"
                    sums.setdefault(whole, []).append((float(pair[0]), float(pair[1])))
            for metric in objects.values():
                metric.update(outputs.logits, batch["labels"])
    found = {key: math.fsum(t for t, _ in of) / math.fsum(c for _, c in of) for key, of in sums.items()}
    found |= {f"in_order/{key}": value for key, value in objects["in_order"].compute().items()}
    return {**found, "median": float(objects["median"].compute())}


def eval_all(requests: list[TrainRequest], ranks: Ranks) -> list[tuple[list[dict[str, Any]], Any]]:
    """Run each request on these ranks: its ``eval`` events, and its result, or why it was refused."""
    done = []
    for one in requests:
        events: list[dict[str, Any]] = []
        result: Any
        try:
            result = train(one, dataclasses.replace(ranks, _emit=events.append))
        except DoesNotFit as reason:
            result = str(reason)
        done.append(([event for event in events if event["event"] == "eval"], result))
    return done
