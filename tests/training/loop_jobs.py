"""Jobs for the tests of the training loop: small, and some of them wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate


def line(unused: bool = False, dropout: float = 0.0, norm: bool = False, frozen: bool = False) -> nn.Module:
    """Some layers in a row."""
    layers: list[nn.Module] = [
        nn.Linear(4, 8),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(8, 8),
        nn.Linear(8, 3),
    ]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    model = nn.Sequential(*layers)
    if unused:
        model.extra = nn.Parameter(torch.zeros(2))
    return model.requires_grad_(not frozen)


class LeavesOut(nn.Sequential):
    """Gives a part of what asks for gradients as its parameters."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from self[-1].parameters()


def leaves_out() -> nn.Module:
    return LeavesOut(*line())


def nested() -> DataLoader[Any]:
    """Batches of samples of several lengths, in a tensor of tensors."""

    def collate(rows: list[Any]) -> Any:
        xs, ys = zip(*rows, strict=True)
        return torch.nested.nested_tensor(list(xs), layout=torch.jagged), torch.stack(ys)

    rows = [(torch.zeros(1 + number % 3, 4), torch.tensor(0)) for number in range(16)]
    return DataLoader(rows, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


def different_on_each_rank() -> nn.Module:
    torch.manual_seed(os.getpid())
    return line()


def no_module() -> str:
    return "gpt2"


def loss_and_penalty(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(outputs, targets), outputs.square().mean()


def loss_and_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(outputs, targets), outputs


def loss_and_metric(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return cross_entropy(outputs, targets), (targets < 1).float().mean()


def loss_and_count(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return cross_entropy(outputs, targets, reduction="sum"), len(targets)


def groups_without_params(model: nn.Module) -> list[Any]:
    return [{"weights": list(model.parameters())}]


def without_data() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def refuses() -> nn.Module:
    raise OSError("the weights are not here")


def scripted(norm: bool = False) -> nn.Module:
    """A part that TorchScript has compiled; with a norm it has buffers that follow the batches."""
    model = line(norm=norm)
    return nn.Sequential(torch.jit.script(model[:3]), *model[3:])


def synchronized() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(line(norm=True))


def tied_by_memory(kind: str) -> nn.Module:
    """Two tensors in one memory."""
    model = line()
    if kind == "data":
        model[0].weight = nn.Parameter(torch.randn(8, 4))
        model.extra = nn.Linear(4, 8)
        model.extra.weight.data = model[0].weight.data
    elif kind == "turned":
        model.extra = nn.Parameter(model[0].weight.t())
    elif kind == "buffer":
        model.register_buffer("extra", model[0].weight.detach()[2:])
    elif kind == "side by side":
        both = torch.randn(8, 6)
        model[0].weight, model.extra = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])
        model.register_buffer("more", both[:, 4:5].clone())
    elif kind == "frozen":
        model.extra = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        model.register_buffer("part", model.extra.data[:2])
    return model


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("attention_mask")


def broken() -> nn.Module:
    return Broken(4, 3)


class Named(nn.Module):
    """Takes a mapping and computes its own loss, as Hugging Face's models do."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__()
        self.line = line()
        self.silent = silent

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.line(x)
        loss = None if labels is None or self.silent else cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


def points(samples: int = 20, batch_size: int = 8, named: bool = False, nan_at: int | None = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    y = (x.sum(1) > 0).long()
    if nan_at is not None:
        x[nan_at] = torch.nan
    if named:
        return DataLoader([{"x": a, "labels": b} for a, b in zip(x, y, strict=True)], batch_size=batch_size)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=nan_at is None)


def points_in_order() -> Any:
    return DataLoader(points().dataset, batch_size=8)


class Refilled:
    """Batches that are one tensor, filled anew for each."""

    def __iter__(self) -> Iterator[Any]:
        x, y = torch.empty(4, 4), torch.empty(4, dtype=torch.long)
        array, text = numpy.zeros((4, 1)), numpy.array(["none"] * 4)
        for number in range(3):
            x.fill_(number)
            y.fill_(number)
            array.fill(number)
            text[:] = str(number)
            yield {"x": x, "labels": y, "array": array, "text": text}


class Doubles(DataLoader[Any]):
    """A loader that changes batches on their way out."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, y in super().__iter__():
            yield 2 * x, y


def doubled() -> Doubles:
    return Doubles(points().dataset, batch_size=8)


@dataclass
class Rows:
    x: torch.Tensor
    weights: torch.Tensor


def rows(samples: list[Any]) -> Rows:
    return Rows(*default_collate(samples))


def of_rows(batch_size: int = 8) -> Any:
    """Batches with a field that the model does not take."""
    return DataLoader(TensorDataset(torch.zeros(16, 4), torch.ones(16)), batch_size, collate_fn=rows)


class Weighing(nn.Linear):
    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * weights


def weighing() -> nn.Module:
    return Weighing(4, 3)


def triples(batch_size: int = 8) -> Any:
    x = torch.zeros(16, 4)
    return DataLoader(TensorDataset(x, x, x), batch_size=batch_size)


def loss(outputs: Any, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        return cross_entropy(outputs.logits, batch["labels"])
    return cross_entropy(outputs, batch)


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs * self.temperature, targets)


tempered = Tempered()
tempered_for_good = Tempered().requires_grad_(False)


def rounding_line() -> nn.Module:
    """Has float32 multiplied in TensorFloat-32 from here on."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cudnn.fp32_precision = "tf32"
    return line()


def exact_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Only to be had where float32 is multiplied exactly."""
    if torch.backends.cuda.matmul.fp32_precision != "ieee":  # type: ignore[attr-defined]
        raise ArithmeticError("numbers are rounded")
    return cross_entropy(outputs, targets)


def loss_of_one_number(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets).reshape(1)


def loss_per_sample(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def loss_of_three(outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, weights)


def loss_as_number(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return cross_entropy(outputs, targets).item()


def loss_detached(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets).detach()


def loss_raises(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("division by zero")


def no_groups(model: nn.Module) -> list[Any]:
    return [{"params": [torch.zeros(1)]}]


def named(model: nn.Module) -> list[Any]:
    return list(model.named_parameters())


def named_in_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [named], "lr": 0.1} for named in model.named_parameters()]


def last_layer(model: nn.Module) -> list[Any]:
    """Of a line with a BatchNorm or without: the last layer, though the first has gradients, too."""
    return [{"params": list(model[-1].parameters())}]


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Its rate follows a counter that it keeps itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.counter, self.seen = 0, [0.0]

    def step(self, closure: Any = None) -> Any:
        self.counter += 1
        self.seen.append(1.0 / self.counter)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(sum(self.seen))
        return super().step(closure)


class Hiding(torch.optim.SGD):
    """It keeps something of each parameter where nobody looks."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.averages: dict[Any, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.averages.setdefault(parameter, torch.zeros_like(parameter))
                parameter.grad.copy_(average.mul_(0.9).add_(parameter.grad))
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """It adds noise, of torch's and of Python's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(random.gauss(0.0, 0.1) * torch.randn_like(parameter))
        return super().step(closure)


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Wants a metric in each step."""


def fail_epoch(told: Mapping[str, Any]) -> None:
    raise ValueError("the channel is gone")
