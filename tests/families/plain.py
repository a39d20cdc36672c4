"""Modules of plain torch, each with something that a technique can get wrong."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from families import data
from families.family import Family, register

WIDTH, CLASSES = 12, 4


def class_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over the samples."""
    return cross_entropy(outputs, targets)


def mean_of_squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over the samples, of numbers."""
    return (outputs - targets).square().mean()


def multi_class_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(outputs, batch["target"])


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss in which every sample meets every other one of the batch."""
    return cross_entropy(outputs @ targets.T, torch.arange(len(outputs)))


def vectors(samples: int = data.SAMPLES):
    """Vectors and classes."""

    def batches():
        def row(number, generator):
            return torch.randn(WIDTH, generator=generator), torch.randint(0, CLASSES, (), generator=generator)

        return data.loader(row, samples)

    return batches


def pictures(channels_last: bool = False, samples: int = data.SAMPLES):
    def batches():
        def row(number, generator):
            return torch.randn(3, 6, 6, generator=generator), torch.randint(
                0, CLASSES, (), generator=generator
            )

        def collate(rows):
            images, targets = map(torch.stack, zip(*rows, strict=True))
            return (images.to(memory_format=torch.channels_last) if channels_last else images), targets

        return data.loader(row, samples, collate=collate)

    return batches


def tokens(length: int = 7):
    def batches():
        def row(number, generator):
            return data.ids(generator, length), torch.randint(0, CLASSES, (), generator=generator)

        return data.loader(row)

    return batches


def twins():
    def row(number, generator):
        return torch.randn(WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)

    return data.loader(row)


def time_first():
    """Batches of (time, samples, features) from an iterable, which Saturn has to cut itself."""
    generator = torch.Generator().manual_seed(5)
    sizes = (5, 5, 3)
    batches = [
        (
            torch.randn(6, size, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]
    return torch.utils.data.DataLoader(data.Stream(batches), batch_size=None)


def time_first_table():
    """The same from a dataset, put together by a collate function."""

    def row(number, generator):
        return torch.randn(6, WIDTH, generator=generator), torch.randint(0, CLASSES, (), generator=generator)

    def collate(rows):
        series, targets = zip(*rows, strict=True)
        return torch.stack(series, 1), torch.stack(targets)

    return data.loader(row, collate=collate)


def several_inputs():
    return data.fields(
        words=data.whole(4, data.VOCABULARY, 5),
        features=data.normal(WIDTH),
        target=data.whole(0, CLASSES),
    )()


class Block(nn.Module):
    """Norm, two linear layers, and around them."""

    def __init__(
        self, width: int = WIDTH, hidden: int = 2 * WIDTH, norm: type[nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between a layer in and a layer out."""

    def __init__(self, blocks: list[nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack() -> nn.Module:
    model = Stack([Block() for _ in range(4)])
    model.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    return model


def linears() -> nn.Module:
    """Nothing but linear layers in a row."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, CLASSES))


def narrowing() -> nn.Module:
    """Linear layers each of another width."""
    widths = [WIDTH, 10, 8, 6, CLASSES]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], nn.Tanh(), layers[3])


class Recurrent(nn.Module):
    """Recurrent layers; a classifier on the last moment of the series."""

    def __init__(self, cells: list[nn.Module], time: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)
        self.time = time
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        for cell in self.cells:
            series, _ = cell(series)
        return self.last(series.select(self.time, -1))


def time_first_rnn() -> nn.Module:
    return Recurrent([nn.RNN(WIDTH, WIDTH) for _ in range(2)], time=0)


def gru() -> nn.Module:
    return Recurrent([nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3)], time=1)


def lstm() -> nn.Module:
    return Recurrent([nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True) for _ in range(3)], time=1)


def series():
    def row(number, generator):
        return torch.randn(6, WIDTH, generator=generator), torch.randint(0, CLASSES, (), generator=generator)

    return data.loader(row)


class Convolutions(nn.Sequential):
    """Convolutions of one width, with a norm each."""

    def __init__(self, norm, depth: int = 3) -> None:
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()) for _ in range(depth)]
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        )


def channels_last() -> nn.Module:
    return Convolutions(lambda width: nn.GroupNorm(2, width)).to(memory_format=torch.channels_last)


def batch_norm() -> nn.Module:
    return Convolutions(nn.BatchNorm2d)


def batch_norm_of_vectors() -> nn.Module:
    return Stack([Block(norm=nn.BatchNorm1d) for _ in range(3)])


class Words(nn.Module):
    """An embedding and blocks after it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(data.VOCABULARY, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class BagOfWords(nn.Module):
    """Nothing but a sparse embedding, as optimizers for sparse gradients want it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(data.VOCABULARY, CLASSES, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids)


def normed_weights() -> nn.Module:
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        weight_norm(block.up)
    return Stack(blocks)


def spectral() -> nn.Module:
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        spectral_norm(block.up)
    return Stack(blocks)


CLASS = "families.plain:class_loss"
# Sparse gradients have no norm to clip by, and weight decay would make them dense.
SPARSE = {"optimizer_args": {}, "clip_grad_norm": None}


def plain(name, model, batches, loss=CLASS, **settings) -> Family:
    return Family(name, "plain", model, batches, loss, **settings)


register(
    plain("blocks with a plan", stack, vectors()),
    plain("linear layers in a row", linears, vectors()),
    plain("linear layers, narrowing", narrowing, vectors()),
    plain("rnn, time first", time_first_rnn, time_first),
    plain("rnn, time first, said so", time_first_rnn, time_first, job={"batch_dim": {"0": 1, "1": 0}}),
    plain("rnn, time first, from a dataset", time_first_rnn, time_first_table),
    plain("gru", gru, series),
    plain("lstm", lstm, series),
    plain("convolutions, channels last", channels_last, pictures(channels_last=True)),
    plain("batch norm", batch_norm, pictures(samples=14), couples=True),
    plain("batch norm of vectors", batch_norm_of_vectors, vectors(14), couples=True),
    plain("embedding", lambda: Words(sparse=False), tokens()),
    plain("embedding, sparse", lambda: Words(sparse=True), tokens(), recipe=SPARSE),
    plain("bag of words, sparse", BagOfWords, tokens(), recipe=SPARSE),
    plain("weight norm", normed_weights, vectors()),
    plain("spectral norm", spectral, vectors(), couples=True),
)
