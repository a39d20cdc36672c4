"""Models, data and losses that the guard looks at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout, normalize
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM


class Blocks(nn.Module):
    """A few blocks in a row, with whatever a test wants added to them."""

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.extra = extra
        self.leave = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.leave(x if self.extra is None else self.extra(x))


class CountsPasses(nn.Module):
    """It counts its passes, for something that begins much later, and notes how large the last batch was."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.last = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        self.last = len(x)
        return x if self.passes < 10_000 else 2 * x


class Unused(nn.Module):
    """It has a parameter that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Drops(nn.Module):
    """Dropout by a function that was imported before anybody could patch its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, 0.3, self.training)


class DropPath(nn.Module):
    """Stochastic depth: whole samples are left out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.floor(0.5 + torch.rand(len(x), 1, dtype=x.dtype)) if self.training else 0.5
        return x * kept / 0.5


class Turns(nn.Module):
    """It has a complex parameter, which no cast of a model makes wider."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.by, n=8)
        return turned


class DrawsLittle(nn.Module):
    """What it draws changes the loss by less than the steps of a training do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-3 * torch.rand(len(x), 1, dtype=x.dtype)) if self.training else x


class Casts(nn.Module):
    """It adds in a lower format, in which the gradients of a batch are summed; of sums nothing is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() + self.bias.float()).to(x.dtype)


NUMBERS, TORCH = np.random.default_rng(3), torch.Generator().manual_seed(3)


class OwnNoise(nn.Module):
    """Noise by a generator of this module, of which each process has one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=TORCH, dtype=x.dtype) if self.training else x


class CountsInClass(nn.Module):
    """It counts its passes in its class."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountsInClass.passes += self.training
        return x * (1 + CountsInClass.passes / 10)


class CompilesAPart(nn.Module):
    """It has torch.compile make a function, which the compiler keeps in this Python module."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(x)
        return mixed


class HalvesWhatItSteps(torch.optim.SGD):
    """It changes gradients before the step of its base class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


class HalvedGradient(nn.Module):
    """A hook changes the gradient of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.weight.register_hook(lambda gradient: gradient / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class CoupledFromZero(nn.Module):
    """It lets samples see each other by a product that is zero at first, and so are its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = x * self.adapter
        return x + added + 100 * (added - added.mean(0)) ** 2


class CoupledInTraining(nn.Module):
    """Samples see each other while it trains, as a router's loss has them do, and not in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(0) if self.training else x


class ByBatchSize(nn.Module):
    """It computes otherwise where a batch is small."""

    def __init__(self, below: int) -> None:
        super().__init__()
        self.below = below

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) < self.below else x


class Reduces(nn.Module):
    """It notes a mean of all ranks, where there are several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(mean)
        return x


class RemembersSamples(nn.Module):
    """It pulls what it makes of a sample towards what it made of it before, as temporal ensembling does."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[float, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        keys = x.detach().sum(1).round(decimals=1).tolist()
        pulls = [(y - self.before.get(key, y.detach())) ** 2 for key, y in zip(keys, x, strict=True)]
        self.before.update(zip(keys, x.detach().clone(), strict=True))
        return x + torch.stack(pulls)


class CountsSamples(nn.Module):
    """It learns more from a sample that it has met before; which it has, it notes in an array of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.met = np.zeros(1009)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (10 * x.detach().sum(1)).round().long().numpy() % len(self.met)
        y = x * torch.from_numpy(1 + self.met[rows])[:, None].to(x)
        self.met[rows] += self.training
        return y


class Caches(nn.Module):
    """It keeps what it needs for batches of each size, and counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.by_size: dict[int, torch.Tensor] = {}
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        ones = self.by_size.setdefault(len(x), torch.ones(len(x), 1, dtype=x.dtype))
        return x * ones * (1 + self.passes / 10)


class TakesTurns(nn.Module):
    """It trains its layer in every other pass.

    :param thaws: begin with a layer that is frozen.
    """

    def __init__(self, thaws: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).requires_grad_(not thaws)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.layer.requires_grad_(self.passes % 2 == 0)
            self.passes += 1
        found: torch.Tensor = self.layer(x)
        return found


class FreezesLater(TakesTurns):
    """It trains its layer in the first three passes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.layer.requires_grad_(self.passes < 3)
            self.passes += 1
        found: torch.Tensor = self.layer(dropout(x, 0.3, self.training))
        return found


EXTRAS = {
    "freezes later": FreezesLater,
    "remembers samples": RemembersSamples,
    "counts samples": CountsSamples,
    "caches": Caches,
    "takes turns": TakesTurns,
    "thaws": lambda: TakesTurns(thaws=True),
    "reduces": Reduces,
    "small batches": lambda: ByBatchSize(13),
    "small batches after a norm": lambda: nn.Sequential(nn.BatchNorm1d(8), ByBatchSize(13)),
    "coupled in training": CoupledInTraining,
    "halved gradient": HalvedGradient,
    "compiled": CompilesAPart,
    "coupled from zero": CoupledFromZero,
    "nothing": lambda: None,
    "unused": Unused,
    "counts passes": CountsPasses,
    "norm": lambda: nn.BatchNorm1d(8),
    "drops": Drops,
    "own noise": OwnNoise,
    "counts in its class": CountsInClass,
    "drop path": DropPath,
    "draws little": DrawsLittle,
    "turns": Turns,
    "casts": Casts,
}


def plain(extra: str = "nothing") -> nn.Module:
    return Blocks(EXTRAS[extra]())


def other_each_time() -> nn.Module:
    """With weights that no seed decides."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    return plain()


def as_it_is_evaluated(extra: str) -> nn.Module:
    """In the mode that ``from_pretrained`` leaves models in."""
    return plain(extra).eval()


def broken() -> nn.Module:
    return nn.Linear(7, 4)


def vectors(batch_size: int = 6, samples: int = 20) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator)
    targets = torch.randint(0, 4, (samples,), generator=generator)
    targets[::3] = -100
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


class Sharded(IterableDataset[Any]):
    """Batches of which each rank would take its own, where there are several."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from list(vectors())[rank::size]


def sharded_stream() -> DataLoader[Any]:
    return DataLoader(Sharded(), batch_size=None)


class MovedByRank(TensorDataset):
    """Samples that each rank moves by its number, where there are several."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)  # type: ignore[no-untyped-call]
        return inputs + (dist.get_rank() if dist.is_initialized() else 0), targets


def moved_by_rank() -> DataLoader[Any]:
    return DataLoader(MovedByRank(*vectors().dataset.tensors), batch_size=6)  # type: ignore[attr-defined]


def sharded(batch_size: int = 6) -> DataLoader[Any]:
    data = vectors().dataset
    several = dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
    sampler = DistributedSampler(data, shuffle=False) if several else None
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def unseeded(batch_size: int = 6, samples: int = 20) -> DataLoader[Any]:
    inputs = torch.from_numpy(np.random.default_rng().normal(size=(samples, 6)))
    return DataLoader(TensorDataset(inputs, torch.arange(samples) % 4), batch_size=batch_size)


def sum_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counted = targets != -100
    return cross_entropy(outputs, targets.clamp(min=0), reduction="none")[counted].sum(), counted.sum()


def weighted_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights come to less than one, and no whole number."""
    weights = 0.013 * (2 + targets.clamp(min=0)).double()
    losses = cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (weights * losses).sum(), weights.sum()


def loss_and_metric(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mean_loss(outputs, targets), outputs.detach().softmax(1).amax(1).mean()


def partly_labelled() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of which the first sample of the second has no target."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(8, 6, 6, generator=generator)
    targets = torch.randint(0, 4, (8, 6), generator=generator)
    targets[1, 0] = -100
    return list(zip(inputs, targets, strict=True))


def labelled_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """No number where no sample has a target."""
    return cross_entropy(outputs, targets)


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets.clamp(min=0))


def by_world_size(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What the environment says of ranks makes another loss."""
    return mean_loss(outputs, targets) * int(os.environ.get("WORLD_SIZE", "7"))


def gathered_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """It weighs itself by the outputs of all ranks, where there are several."""
    everyones = [outputs]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyones = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, outputs.detach())
    return mean_loss(outputs, targets) * len(everyones)


def contrastive_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The other samples of the batch are what each is told apart from."""
    similar = normalize(outputs) @ normalize(outputs.flip(1)).T
    return cross_entropy(similar, torch.arange(len(outputs)))


def loss_by_draw(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Weighs samples by a generator of this module."""
    weights = torch.as_tensor(NUMBERS.random(len(targets)))
    return (weights * cross_entropy(outputs, targets, reduction="none")).mean()


def packed_llama(use_cache: bool) -> nn.Module:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=use_cache,
    )
    return LlamaForCausalLM(config)


def packed_rows() -> list[dict[str, torch.Tensor]]:
    """Of two sequences each, told apart by their positions."""
    tokens = torch.arange(8)[None] % 5
    return [{"input_ids": tokens, "position_ids": torch.arange(8)[None] % 4, "labels": tokens}] * 2


class Clamped(Blocks):
    """Gradients are clamped on their way: it matters what they are gradients of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)) if x.requires_grad else None
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.leave(x)


def clamped() -> nn.Module:
    return Clamped()


def three_of_each(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A sum over more things than there are samples."""
    return cross_entropy(outputs, targets, reduction="sum"), 3 * len(targets)
