"""Batches of many kinds, and modules as they come: named tuples, offsets, trees, compiled models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader

from families import data
from families.family import Family, register
from families.plain import CLASS, CLASSES, WIDTH, Block, Stack, stack, vectors
from families.research_gradients import Loss

KIND = "kinds of batches"
WORDS = 12


class Pair(NamedTuple):
    x: torch.Tensor
    label: torch.Tensor


def named() -> Any:
    return data.loader(
        lambda n, g: Pair(torch.randn(WIDTH, generator=g), torch.randint(0, CLASSES, (), generator=g))
    )


class Lengths(BatchSampler):
    """As many samples in a batch as a number of tokens allows."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2, 3], [4, 5], [6], [7, 8, 9, 10])

    def __len__(self) -> int:
        return 4


def by_tokens() -> Any:
    """Rows of several lengths, padded to the longest; batches of 4, 2, 1 and 4."""
    generator = torch.Generator().manual_seed(7)
    rows = [(data.ids(generator, 3 + n % 5), n % CLASSES) for n in range(data.SAMPLES)]

    def collate(samples: list[Any]) -> Any:
        return {
            "tokens": pad_sequence([sample[0] for sample in samples], batch_first=True),
            "lengths": torch.tensor([len(sample[0]) for sample in samples]),
            "labels": torch.tensor([sample[1] for sample in samples]),
        }

    return DataLoader(data.Rows(rows), batch_sampler=Lengths(), collate_fn=collate)


class Reads(nn.Module):
    """Rows of tokens, a mean over those that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(data.VOCABULARY, WIDTH), stack()

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> Loss:
        there = torch.arange(tokens.shape[1]) < lengths[:, None]
        states = (self.words(tokens) * there[..., None]).sum(1) / lengths[:, None]
        return Loss(cross_entropy(self.body(states), labels))


def with_offsets() -> Any:
    """Words of all samples in one row, where each sample's begin, and a class each."""

    def row(number: int, generator: torch.Generator) -> Any:
        return torch.randint(0, WORDS, (1 + number % 3,), generator=generator), number % CLASSES

    def collate(rows: list[Any]) -> Any:
        lengths = torch.tensor([0, *(len(words) for words, _ in rows)])
        return {
            "words": torch.cat([words for words, _ in rows]),
            "offsets": lengths.cumsum(0)[:-1],
            "labels": torch.tensor([label for _, label in rows]),
        }

    return data.loader(row, collate=collate)


class Bags(nn.Module):
    """DLRM: bags of words by their offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.body = nn.EmbeddingBag(WORDS, WIDTH), stack()

    def forward(self, words: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> Loss:
        return Loss(cross_entropy(self.body(self.bags(words, offsets)), labels))


def trees() -> Any:
    """Trees as nested tuples of numbers."""

    def grow(generator: torch.Generator, depth: int) -> Any:
        if depth == 0 or torch.rand((), generator=generator) < 0.3:
            return int(torch.randint(0, WORDS, (), generator=generator))
        return grow(generator, depth - 1), grow(generator, depth - 1)

    def collate(rows: list[Any]) -> Any:
        return [tree for tree, _ in rows], torch.tensor([label for _, label in rows])

    return data.loader(lambda n, g: (grow(g, 3), n % CLASSES), collate=collate)


class Tree(nn.Module):
    """Computes trees from their leaves up, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(2 * WIDTH, WIDTH), stack()

    def forward(self, trees: list[Any]) -> torch.Tensor:
        return self.last(torch.stack([self.compute(tree) for tree in trees]))

    def compute(self, tree: Any) -> torch.Tensor:
        if isinstance(tree, tuple):
            return torch.tanh(self.join(torch.cat([self.compute(part) for part in tree])))
        return self.leaf.weight[tree]


def by_task() -> Any:
    """Each batch is of one task, whose name it has."""

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(7)
        for number, size in enumerate((5, 4, 5, 1)):
            yield {
                "x": torch.randn(size, WIDTH, generator=generator),
                "labels": torch.randint(0, CLASSES, (size,), generator=generator),
                "task": ("classes", "numbers")[number % 2],
            }

    return data.Stream(list(batches()))


class Tasks(nn.Module):
    """A head for each task; the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack([Block() for _ in range(3)])
        self.heads = nn.ModuleDict({"classes": nn.Linear(CLASSES, CLASSES), "numbers": nn.Linear(CLASSES, 1)})

    def forward(self, x: torch.Tensor, labels: torch.Tensor, task: str) -> Loss:
        told = self.heads[task](self.body(x))
        if task == "numbers":
            return Loss(functional.mse_loss(told[:, 0], labels.to(told)))
        return Loss(cross_entropy(told, labels))


def tokenized() -> Any:
    """Batches that a tokenizer made, in its own class."""
    from transformers import BatchEncoding

    def row(number: int, generator: torch.Generator) -> Any:
        return torch.randn(WIDTH, generator=generator), torch.randint(0, CLASSES, (), generator=generator)

    def collate(rows: list[Any]) -> Any:
        x, labels = map(torch.stack, zip(*rows, strict=True))
        return BatchEncoding({"x": x, "labels": labels})

    return data.loader(row, collate=collate)


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Loss:
        return Loss(cross_entropy(self.body(x), labels))


class Rotary(nn.Module):
    """Attention whose table of rotations grows when a row is longer than any before."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("table", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.table):
            angles = torch.arange(x.shape[1])[:, None] / 10 ** (torch.arange(WIDTH // 2) / WIDTH)
            self.table = torch.cat([angles.cos(), angles.sin()], -1).to(x)
        cos, sin = self.table[: x.shape[1]].chunk(2, -1)
        queries, keys, values = self.all(x).chunk(3, -1)

        def turn(y: torch.Tensor) -> torch.Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        return x + functional.scaled_dot_product_attention(turn(queries), turn(keys), values)


class ReadsRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(data.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Rotary() for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> Loss:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return Loss(cross_entropy(self.last(x[torch.arange(len(x)), lengths - 1]), labels))


class Spectral(nn.Module):
    """A Fourier neural operator: complex weights for a few frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, 2) / 8)
        self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        weight = torch.view_as_complex(self.weight)
        low = torch.einsum("btc,cdt->btd", spectrum[:, :3], weight)
        back = torch.fft.irfft(functional.pad(low, (0, 0, 0, spectrum.shape[1] - 3)), n=x.shape[1], dim=1)
        return x + torch.tanh(back + self.beside(x))


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Spectral() for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).mean(1)


def rows_in_time() -> Any:
    return data.loader(
        lambda n, g: (torch.randn(8, WIDTH, generator=g), torch.randint(0, CLASSES, (), generator=g))
    )


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer: a sum of bumps on each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.heights = nn.Parameter(torch.randn(WIDTH, WIDTH, 5) / 10)
        self.straight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bumps = torch.exp(-((x[..., None] - self.grid) ** 2))
        return x + torch.einsum("...ik,oik->...o", bumps, self.heights) + functional.silu(x) @ self.straight.T


class Warps(nn.Module):
    """A spatial transformer: looks at a picture through a window that it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(3 * 36, 6)
        nn.init.normal_(self.look.weight, std=0.01)
        self.look.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])
        self.read = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.Flatten())
        self.last = nn.Linear(8 * 16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = self.look(x.flatten(1)).view(-1, 2, 3)
        grid = functional.affine_grid(where, list(x.shape), align_corners=False)
        return self.last(self.read(functional.grid_sample(x, grid, align_corners=False)))


def pictures() -> Any:
    return data.loader(
        lambda n, g: (torch.randn(3, 6, 6, generator=g), torch.randint(0, CLASSES, (), generator=g))
    )


class Memory(nn.Module):
    """Product keys: the best of pairs of half keys, whose values are summed by weight."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 6, WIDTH // 2))
        self.values = nn.EmbeddingBag(36, WIDTH, mode="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = [half @ keys.T for half, keys in zip(x.chunk(2, -1), self.keys, strict=True)]
        both = (scores[0][..., None] + scores[1][..., None, :]).flatten(1)
        weight, place = both.topk(4)
        return x + self.values(place, per_sample_weights=weight.softmax(-1))


class Points(nn.Module):
    """A pointer network: chooses one of the candidates of each sample; those that are not there get -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack([Block() for _ in range(3)])
        self.query = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: torch.Tensor, there: torch.Tensor, labels: torch.Tensor) -> Loss:
        keys = self.body(x)
        scores = torch.einsum("bc,bkc->bk", self.query(keys.mean(1)), keys) / math.sqrt(CLASSES)
        return Loss(cross_entropy(scores.masked_fill(~there, -math.inf), labels))


class InTime(nn.Module):
    """Returns over time, time first: discounted sums of rewards, back from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.value = Stack([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor, rewards: torch.Tensor) -> Loss:
        told = self.value(x)[..., 0]
        target, targets = told[-1].detach(), []
        for reward in rewards.flip(0):
            target = reward + 0.9 * target
            targets.append(target)
        return Loss(functional.smooth_l1_loss(told, torch.stack(targets[::-1]).detach()))


def played() -> Any:
    def collate(rows: list[Any]) -> Any:
        x, rewards = zip(*rows, strict=True)
        return {"x": torch.stack(x, 1), "rewards": torch.stack(rewards, 1)}

    return data.loader(
        lambda n, g: (torch.randn(5, WIDTH, generator=g), torch.randn(5, generator=g)), collate=collate
    )


def compiled() -> nn.Module:
    return torch.compile(stack(), backend="eager")


def compiled_blocks() -> nn.Module:
    model = stack()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


class Oblique(nn.Module):
    """A soft decision tree whose leaves share one matrix, by a list of tensors that are not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.split = nn.Linear(WIDTH, 3)
        self.leaves = nn.Parameter(torch.randn(4, CLASSES))
        self.paths = [
            torch.tensor([1.0, 1, 0]),
            torch.tensor([1.0, 0, 0]),
            torch.tensor([0.0, 0, 1]),
            torch.zeros(3),
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        right = torch.sigmoid(self.split(x))
        chances = [(right * path.to(x) + (1 - right) * (1 - path.to(x))).prod(-1) for path in self.paths]
        return torch.stack(chances, -1) @ self.leaves


class Hinted(nn.Module):
    """Takes half of its inputs as what is not a tensor: a list of numbers and a text for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor, hints: list[float], names: list[str], labels: torch.Tensor) -> Loss:
        hint = torch.tensor(hints).to(x) + torch.tensor([len(name) for name in names]).to(x) / 10
        return Loss(cross_entropy(self.body(x + hint[:, None]), labels))


def hinted() -> Any:
    def row(number: int, generator: torch.Generator) -> Any:
        return {
            "x": torch.randn(WIDTH, generator=generator),
            "hints": number / 7,
            "names": "n" * (number % 4),
            "labels": number % CLASSES,
        }

    def collate(rows: list[Any]) -> Any:
        return {
            "x": torch.stack([row["x"] for row in rows]),
            "hints": [row["hints"] for row in rows],
            "names": [row["names"] for row in rows],
            "labels": torch.tensor([row["labels"] for row in rows]),
        }

    return data.loader(row, collate=collate)


class Returns(nn.Module):
    """Returns a tuple whose first part is the loss, when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> Any:
        told = self.body(x)
        return {"logits": told, "extra": (told.mean(), None, [told.detach()])}


def loss_of_mapping(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs["logits"], targets)


register(
    Family("named tuples", KIND, stack, named, CLASS),
    Family("batches by tokens", KIND, Reads, by_tokens),
    Family("rows with offsets", KIND, Bags, with_offsets),
    Family("trees of tuples", KIND, Tree, trees, CLASS),
    Family("a task a batch", KIND, Tasks, by_task),
    Family("a tokenizer's batches", KIND, Classes, tokenized),
    Family("a table that grows", KIND, ReadsRotary, by_tokens),
    Family("fourier operator", KIND, Operator, rows_in_time, CLASS),
    Family("splines on edges", KIND, lambda: Stack([Splines() for _ in range(3)]), vectors(), CLASS),
    Family("spatial transformer", KIND, Warps, pictures, CLASS),
    Family("product keys", KIND, lambda: Stack([Memory() for _ in range(3)]), vectors(), CLASS),
    Family(
        "pointers",
        KIND,
        Points,
        data.fields(
            x=data.normal(4, WIDTH),
            there=lambda n, g: torch.arange(4) <= n % 3,
            labels=lambda n, g: torch.tensor(0),
        ),
    ),
    Family("returns over time", KIND, InTime, played),
    Family("compiled as a whole", KIND, compiled, vectors(), CLASS),
    Family("compiled by block", KIND, compiled_blocks, vectors(), CLASS),
    Family("soft tree", KIND, Oblique, vectors(), CLASS),
    Family("numbers and texts", KIND, Hinted, hinted),
    Family("returns a mapping", KIND, Returns, vectors(), "families.batch_kinds:loss_of_mapping"),
)
