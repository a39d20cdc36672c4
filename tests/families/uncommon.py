"""Jobs with something of their own: codebooks, flows, sets, masks drawn within, pairs, carried states."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from families import data
from families.family import register
from families.plain import CLASSES, WIDTH, Block, Stack, Words, plain, series, tokens, vectors

SLOTS = 3


class Detector(nn.Module):
    """Learned queries look at the parts of a picture; each tells a class and a place, as DETR's do."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.queries = nn.ParameterDict({"slots": nn.Parameter(torch.randn(SLOTS, WIDTH))})
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 3, batch_first=True) for _ in range(2))
        self.kind, self.place = nn.Linear(WIDTH, CLASSES + 1), nn.Linear(WIDTH, 2)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.patch(images).flatten(2).transpose(1, 2)
        x = self.queries["slots"].expand(len(images), -1, -1)
        for layer in self.layers:
            x = x + layer(x, parts, parts, need_weights=False)[0]
        return self.kind(x), self.place(x).sigmoid()


def objects():
    """Pictures with none to three objects each."""

    def row(number, generator):
        kinds = torch.randint(0, CLASSES, (SLOTS,), generator=generator)
        there = torch.arange(SLOTS) < number % (SLOTS + 1)
        return {
            "images": torch.randn(3, 6, 6, generator=generator),
            "kinds": torch.where(there, kinds, CLASSES),
            "labels": torch.rand(SLOTS, 2, generator=generator),
        }

    return data.loader(row)


class DetectorOfBatches(Detector):
    def forward(self, images: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(images)


def matched(outputs: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each object is told by the slot that fits best; by the number of objects in the batch."""
    kinds, places = outputs
    orders = torch.tensor(list(itertools.permutations(range(SLOTS))))
    total = kinds.new_zeros(())
    for kind, place, wanted, where in zip(kinds, places, batch["kinds"], batch["labels"], strict=True):
        there = (wanted < CLASSES).to(place)
        costs = [
            functional.cross_entropy(kind[order], wanted, reduction="sum")
            + ((place[order] - where).abs().sum(-1) * there).sum()
            for order in orders
        ]
        total = total + torch.stack(costs).min()
    return total / (batch["kinds"] < CLASSES).sum().clamp(min=1)


class Codebook(nn.Module):
    """Vectors are replaced by the nearest of a codebook; gradients pass straight through.

    :param follows: the codebook follows the vectors in the forward pass, in the place of a loss.
    """

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.enter, self.leave = Stack([Block()]), nn.Linear(CLASSES, WIDTH)
        codes = torch.randn(8, CLASSES)
        if follows:
            self.register_buffer("codes", codes)
        else:
            self.codes = nn.Parameter(codes)
        self.follows = follows

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.enter(x)
        chosen = torch.cdist(x, self.codes).argmin(-1)
        near = self.codes[chosen]
        commitment = functional.mse_loss(x, near.detach())
        if not self.follows:
            commitment = functional.mse_loss(near, x.detach()) + 0.25 * commitment
        elif self.training:
            with torch.no_grad():
                for number in chosen.unique():
                    self.codes[number].lerp_(x[chosen == number].mean(0), 0.1)
        return self.leave(x + (near - x).detach()), commitment


def rebuilt(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs[0], targets) + outputs[1]


def the_same():
    def row(number, generator):
        vector = torch.randn(WIDTH, generator=generator)
        return vector, vector.clone()

    return data.loader(row)


class Mixture(nn.Module):
    """A density as a mixture of normals, told in a dataclass."""

    @dataclass
    class Density:
        logits: torch.Tensor
        means: torch.Tensor
        scales: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack([Block() for _ in range(3)])
        self.heads = nn.ParameterList(torch.randn(CLASSES, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Density:
        x = self.body(x)
        logits, means, scales = (x @ head for head in self.heads)
        return self.Density(logits.log_softmax(-1), means, functional.softplus(scales) + 0.1)


def likelihood(outputs: Mixture.Density, targets: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(outputs.means, outputs.scales)
    return -torch.logsumexp(outputs.logits + normal.log_prob(targets.to(outputs.means)[:, None]), -1).mean()


class Flow(nn.Module):
    """A normalising flow; its scales are set by the first batch that it sees (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.shifts = nn.ModuleList(nn.Sequential(nn.Linear(half, 16), nn.Tanh()) for _ in range(4))
        self.outs = nn.ModuleList(nn.Linear(16, 2 * half) for _ in range(4))
        self.scale, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training and not self.set:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0, correction=0) + 0.5))
                self.set.fill_(True)
        x = (x + self.bias) * self.scale
        volume = self.scale.abs().log().sum().expand(len(x))
        for shift, out in zip(self.shifts, self.outs, strict=True):
            kept, changed = x.chunk(2, -1)
            move, stretch = out(shift(kept)).chunk(2, -1)
            stretch = torch.tanh(stretch)
            x = torch.cat([changed * stretch.exp() + move, kept], -1)
            volume = volume + stretch.sum(-1)
        return x, volume


def surprise(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    x, volume = outputs
    return (0.5 * x.square().sum(-1) - volume).mean()


class MaskedPatches(nn.Module):
    """Patches, some of which the forward pass masks by chance, are told from the others."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 3, 24, 0.0) for _ in range(2))

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        masked = torch.rand(series.shape[:2]).argsort(1) < 3
        x = torch.where(masked[..., None], self.mask, series)
        for block in self.blocks:
            x = block(x.transpose(0, 1)).transpose(0, 1)
        return ((x - series).square().mean(-1) * masked).sum(1) / 3


def given(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def pairs_in_order(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of each two samples of the batch the one of the higher class should have the higher score."""
    scores = outputs[:, 0]
    higher = targets[:, None] > targets[None]
    off = functional.softplus(scores[None] - scores[:, None])
    return (off * higher).sum() / higher.sum().clamp(min=1)


def weighted_quantiles(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weighed by sample, over the weights' sum."""
    levels = torch.tensor([0.1, 0.5, 0.9, 0.99]).to(outputs)
    off = batch["labels"][:, None] - outputs
    per_sample = torch.maximum(levels * off, (levels - 1) * off).sum(-1)
    return (per_sample * batch["weight"]).sum() / batch["weight"].sum()


def quantile_pairs(
    outputs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = batch["weight"].sum()
    return weighted_quantiles(outputs, batch) * weights, weights


class Weighed(Stack):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def weighed_samples():
    return data.fields(
        x=data.normal(WIDTH),
        weight=lambda number, generator: torch.tensor(0.5 + number % 3),
        labels=data.normal(),
    )()


class Scan(nn.Module):
    """A diagonal state space with complex numbers, scanned moment by moment."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.complex(-torch.rand(WIDTH), torch.randn(WIDTH)).to(torch.cdouble))
        self.inward, self.outward = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        inputs, decay = self.inward(series), self.rates.exp()
        state, states = torch.zeros_like(inputs[:, 0], dtype=torch.cdouble), []
        for moment in inputs.unbind(1):
            state = state * decay + moment
            states.append(state.real.to(series))
        return series + self.outward(torch.stack(states, 1))


class Scans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scan() for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            series = block(series)
        return self.last(series[:, -1])


class Carried(nn.Module):
    """What it has seen, in a tensor that is no buffer, goes into the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack([Block() for _ in range(2)])
        self.seen = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x + 0.5 * self.seen.to(x))
        if self.training:
            self.seen = (0.5 * self.seen.to(x) + x.mean(0)).detach()
        return out


class Bounded(Words):
    """Words whose vectors the forward pass shortens where they are too long."""

    def __init__(self) -> None:
        super().__init__(sparse=False)
        self.words = nn.Embedding(data.VOCABULARY, WIDTH, padding_idx=5, max_norm=1.0)


class Solver(nn.Module):
    """One block again and again, until the whole batch has come to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(WIDTH, WIDTH), Block()
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for _ in range(6):
            change = 0.2 * (self.block(x) - x)
            x = x + change
            if change.detach().abs().amax() < 0.3:
                break
        return self.last(x)


class Generated(nn.Module):
    """The weights of a layer are made by another, of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.which = nn.Parameter(torch.randn(3, 4))
        self.makers = nn.ModuleList(nn.Linear(4, WIDTH * WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for embedding, maker in zip(self.which, self.makers, strict=True):
            x = x + torch.tanh(functional.linear(x, maker(embedding).view(WIDTH, WIDTH)) / 4)
        return self.last(x)


def _loss(name: str) -> str:
    return f"families.uncommon:{name}"


register(
    plain("sets, matched", DetectorOfBatches, objects, _loss("matched")),
    plain("codebook", lambda: Codebook(follows=False), the_same, _loss("rebuilt")),
    plain("codebook that follows", lambda: Codebook(follows=True), the_same, _loss("rebuilt")),
    plain("mixture density", Mixture, vectors(), _loss("likelihood")),
    plain("flow, set by its first batch", Flow, vectors(), _loss("surprise")),
    plain("patches masked within", MaskedPatches, series, _loss("given"), random=True),
    plain("ranking of pairs", lambda: Stack([Block() for _ in range(3)]), vectors(), _loss("pairs_in_order")),
    plain("quantiles, weighed", lambda: Weighed([Block()]), weighed_samples, _loss("weighted_quantiles")),
    plain(
        "quantiles, weighed, as a pair", lambda: Weighed([Block()]), weighed_samples, _loss("quantile_pairs")
    ),
    plain("scan of complex numbers", Scans, series),
    plain("state carried to the next batch", Carried, vectors()),
    plain("embedding of bounded norm", Bounded, tokens()),
    plain("solver that stops at rest", Solver, vectors()),
    plain("weights made by a network", Generated, vectors()),
)
