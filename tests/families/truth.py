"""The ground truth: plain PyTorch loops, which import nothing of Saturn.

``python -m families.truth FOLDER < recipes`` trains each recipe (a line of JSON) and saves what came out.
"""

# Models without types.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from families import family as rooms


@dataclass(frozen=True)
class Recipe:
    """What is trained and how: all that decides the result.

    :param accumulate: parts each batch is computed in, which matters where a family couples its samples.
    """

    family: str
    optimizer: str = "torch.optim:SGD"
    optimizer_args: Mapping[str, Any] = field(default_factory=lambda: {"momentum": 0.9, "weight_decay": 0.05})
    lr: float = 0.05
    clip_grad_norm: float | None = 1.0
    parameter_groups: str | None = None
    accumulate: int = 1
    epochs: int = 1

    @property
    def key(self) -> str:
        """A name for files."""
        return hashlib.sha1(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def train(recipe: Recipe) -> dict[str, Any]:
    """Train on whole batches in float64: the ``losses`` of the steps and the ``weights`` after the last."""
    family = rooms.find(recipe.family)
    model = rooms.model(recipe.family).double().train()
    loss_of = _load(family.loss) if family.loss else None
    optimizer = _load(recipe.optimizer)(_groups(recipe, model), lr=recipe.lr, **recipe.optimizer_args)
    losses = []
    batches = rooms.data(recipe.family)
    for epoch in range(recipe.epochs):
        for part in (batches, *(getattr(batches, name, None) for name in ("sampler", "dataset"))):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)  # type: ignore[union-attr]
        for batch in batches:
            batch = _double(batch)
            parts = _parts(batch, recipe.accumulate, family.ignored) if family.couples else [(batch, 1.0)]
            total = 0.0
            for part, weight in parts:
                loss = _loss(model, part, loss_of) * weight
                loss.backward()
                total += float(loss.detach())
            losses.append(total)
            if recipe.clip_grad_norm is not None:
                clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
            optimizer.step()
            model.zero_grad()
    return {"losses": losses, "weights": _weights(model)}


def _loss(model: nn.Module, batch: Any, loss_of: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        if loss_of is None:
            return model(**batch).loss
        outputs, target = model(**{key: value for key, value in batch.items() if key != "labels"}), batch
    else:
        outputs, target = model(batch[0]), batch[1]
    loss = loss_of(outputs, target)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def _parts(batch: Any, count: int, ignored: int) -> list[tuple[Any, float]]:
    """A batch in parts of equal size, the first ones larger by one where need be, and the share of each: of
    the labels that count where there are any, else of the samples."""
    tensors = batch.values() if isinstance(batch, Mapping) else batch
    samples = len(next(iter(tensors)))
    parts = []
    for rows in torch.arange(samples).tensor_split(min(count, samples)):
        if isinstance(batch, Mapping):
            part: Any = {key: value[rows] for key, value in batch.items()}
        else:
            part = tuple(value[rows] for value in batch)
        labelled = isinstance(batch, Mapping) and "labels" in batch
        parts.append((part, int((part["labels"] != ignored).sum()) if labelled else len(rows)))
    counted = sum(share for _, share in parts)
    return [(part, share / counted) for part, share in parts]


def _groups(recipe: Recipe, model: nn.Module) -> Any:
    if recipe.parameter_groups:
        return _load(recipe.parameter_groups)(model)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and the buffers that are saved, each once, by the first of its names."""
    saved = set(model.state_dict())
    named = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)]
    return {name: tensor.detach().clone() for name, tensor in named}


def _double(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.double() if data.is_floating_point() else data
    if isinstance(data, Mapping):
        return {key: _double(value) for key, value in data.items()}
    if not isinstance(data, list | tuple):
        return data
    values = [_double(value) for value in data]
    return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)


def _load(reference: str) -> Any:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def save(recipe: Recipe, folder: Path) -> None:
    """Train and write what came out, or what was raised, to ``folder``."""
    try:
        outcome = train(recipe)
    except Exception:
        outcome = {"error": traceback.format_exc()}
    torch.save(outcome, folder / f"{recipe.key}.pt")


def main(folder: Path) -> None:
    """Train what standard input asks for; what fails is written too."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        recipe = Recipe(**json.loads(line))
        save(recipe, folder)
    assert not any(name.startswith("saturn_airflow") for name in sys.modules), "the truth imports Saturn"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
