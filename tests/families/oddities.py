"""More modules of plain torch: routed, left out, frozen, shared, stateful, and those with several inputs."""

from __future__ import annotations

import torch
from torch import nn

from families import data
from families.family import register
from families.plain import CLASSES, WIDTH, Block, Stack, plain, series, several_inputs, stack, twins, vectors


class Experts(nn.Module):
    """Each sample goes to one of the experts, by the sign of its features; some get none."""

    def __init__(self, widths: list[int], idle: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block(hidden=width) for width in widths)
        self.idle = idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.8).long()
        if self.idle:
            chosen = chosen % 2
        out = x.clone()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


def experts(widths: list[int], idle: bool = False):
    return lambda: Stack([Experts(widths, idle) for _ in range(2)])


class Depth(nn.Module):
    """Blocks of which some are left out, by chance or in turns."""

    def __init__(self, by_chance: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.by_chance = by_chance
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.calls += self.training
        for number, block in enumerate(self.blocks):
            left_out = torch.rand(()) < 0.4 if self.by_chance else (x.mean() > 0) == bool(number % 2)
            if not (self.training and left_out):
                x = block(x)
        return self.last(x)


class DropPath(nn.Module):
    """Stochastic depth: a block is left out for some of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(x), 1) > 0.4 if self.training else 1.0
        return x + (self.block(x) - x) * kept


def dropout() -> nn.Module:
    return Stack([nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(3)])


def frozen() -> nn.Module:
    """The first half is not trained."""
    model = stack()
    for module in (model.first, model.blocks[0], model.blocks[1]):
        module.requires_grad_(False)
    return model


def partly_frozen() -> nn.Module:
    """Biases alone are trained, and the last layer."""
    model = stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("last"))
    return model


def shared() -> nn.Module:
    """One block three times."""
    block = Block()
    return Stack([block, Block(), block, Block(), block])


def tied() -> nn.Module:
    """Two blocks share one of their matrices."""
    blocks = [Block() for _ in range(4)]
    blocks[2].up.weight = blocks[0].up.weight
    return Stack(blocks)


class Scaled(nn.Module):
    """A block times a number that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.block(x)


def scalar() -> nn.Module:
    return Stack([Scaled() for _ in range(3)])


class Spare(Stack):
    """With a layer that is never used, and parameters of a block that are not either."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(3)])
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].spare = nn.Linear(WIDTH, 3)


class Averaged(nn.Module):
    """A block that keeps a moving average of what it has seen, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(0.1 * x.mean())
                self.calls.add_(1)
        return self.block(x) * (1 + self.seen)


def averaged() -> nn.Module:
    return Stack([Averaged() for _ in range(3)])


class Several(nn.Module):
    """A mapping of several inputs of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(data.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor, features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embed(words).sum(1) + features
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Transformer(nn.Module):
    """torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 3, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.last(self.encoder(series).mean(1))


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(
            WIDTH,
            3,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=24,
            dropout=0.0,
            batch_first=True,
        )
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.last(self.both(series, series[:, :2]).mean(1))


class AsLongAsTheBatch(nn.Module):
    """Blocks that are handed a mask as long as a batch has samples, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.register_buffer("mask", torch.linspace(0.5, 1.5, data.BATCH))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            series = block(series, self.mask)
        return self.last(series.mean(1))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, series: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.block(series) * mask[None, :, None]


def series_as_long_as_the_batch():
    def row(number, generator):
        return torch.randn(data.BATCH, WIDTH, generator=generator), torch.randint(
            0, CLASSES, (), generator=generator
        )

    return data.loader(row)


class Pairs(nn.Module):
    """Blocks that take and return a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        for block in self.blocks:
            x, kept = block(x, kept)
        return self.last(x + kept)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block(x), kept + x


class Logs(Stack):
    """Outputs of minus infinity for classes that a sample can't be of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        impossible = torch.tensor([False] * CLASSES + [True])
        outputs = torch.cat([outputs, outputs[:, :1]], 1)
        return outputs.masked_fill(impossible, float("-inf"))


def logs() -> nn.Module:
    return Logs([Block() for _ in range(3)])


def twin_tower() -> nn.Module:
    model = stack()
    model.last = nn.Linear(WIDTH, WIDTH)
    return model


register(
    plain("experts of one shape", experts([8, 8, 8, 8]), vectors()),
    plain("experts of several shapes", experts([4, 8, 6, 10]), vectors()),
    plain("experts, some idle", experts([8, 8, 8, 8], idle=True), vectors()),
    plain("blocks left out by the data", lambda: Depth(by_chance=False), vectors(), couples=True),
    plain("layer drop", lambda: Depth(by_chance=True), vectors(), random=True),
    plain("stochastic depth", lambda: Stack([DropPath() for _ in range(3)]), vectors(), random=True),
    plain("dropout", dropout, vectors(), random=True),
    plain("frozen half", frozen, vectors()),
    plain("frozen but for biases", partly_frozen, vectors()),
    plain("a block used three times", shared, vectors()),
    plain("blocks that share a matrix", tied, vectors()),
    plain("scalar parameters", scalar, vectors()),
    plain("unused parameters", Spare, vectors()),
    plain("buffers that follow the data", averaged, vectors(), couples=True),
    plain("several inputs", Several, several_inputs, "families.plain:multi_class_loss"),
    plain("torch's transformer encoder", Transformer, series),
    plain("torch's transformer", Translator, series),
    plain("a mask as long as the batch", AsLongAsTheBatch, series_as_long_as_the_batch),
    plain("blocks that return pairs", Pairs, vectors()),
    plain("outputs of minus infinity", logs, vectors()),
    plain("contrastive loss", twin_tower, twins, "families.plain:contrast", couples=True),
)
