"""Tasks as they are in use: detection, transducers, fields, clicks, siamese and adversarial training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from families import data
from families.family import Family, register
from families.plain import CLASS, CLASSES, WIDTH, Block, Stack, pictures, series, stack, vectors

KIND = "practice"
EPOCHS = {"epochs": 2}


class Capsules(nn.Module):
    """Routing by agreement, three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 24)
        self.votes = nn.Parameter(torch.randn(6, CLASSES, 4, 5) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)).view(-1, 6, 1, 1, 4)
        votes = (x @ self.votes).squeeze(-2)
        logits = torch.zeros_like(votes[..., 0])
        for number in range(3):
            shares = logits.softmax(-1).unsqueeze(-1)
            out = (shares * (votes if number == 2 else votes.detach())).sum(1)
            size = out.square().sum(-1, keepdim=True)
            out = out * size / (1 + size) / (size + 1e-8).sqrt()
            logits = logits + (votes.detach() * out.detach().unsqueeze(1)).sum(-1)
        return out.norm(dim=-1)


def margins(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    there = functional.one_hot(targets, CLASSES)
    off = there * (0.9 - outputs).relu().square() + 0.5 * (1 - there) * (outputs - 0.1).relu().square()
    return off.sum(-1).mean()


class Tags(nn.Module):
    """A conditional random field over a GRU; its loss is its own, by dynamic programming, per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(data.VOCABULARY, WIDTH)
        self.cells = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.scores = nn.Linear(WIDTH, CLASSES)
        self.moves = nn.Parameter(torch.randn(CLASSES, CLASSES) / 3)

    def forward(self, **inputs: torch.Tensor) -> Any:
        x = self.words(inputs["ids"])
        for cell in self.cells:
            x = cell(x)[0]
        scores, tags, there = self.scores(x), inputs["tags"], inputs["there"]
        total, chosen = scores[:, 0], scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for now in range(1, scores.shape[1]):
            next_total = (total[:, :, None] + self.moves + scores[:, now, None]).logsumexp(1)
            total = torch.where(there[:, now, None], next_total, total)
            move = self.moves[tags[:, now - 1], tags[:, now]]
            chosen = chosen + there[:, now] * (move + scores[:, now].gather(1, tags[:, now, None]).squeeze(1))
        return {"likelihood": chosen - total.logsumexp(1)}


def unlikely(outputs: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    return -outputs["likelihood"].mean()


def tagged():
    """Lists of several lengths, padded and sorted by length in the collate function."""

    def row(number, generator):
        length = 2 + number % 5
        return data.ids(generator, length), torch.randint(0, CLASSES, (length,), generator=generator)

    def collate(rows):
        rows = sorted(rows, key=lambda row: -len(row[0]))
        ids, tags = (nn.utils.rnn.pad_sequence(part, batch_first=True) for part in zip(*rows, strict=True))
        return {"ids": ids, "tags": tags, "there": ids > 0}

    return data.loader(row, collate=collate)


class Ranker(nn.Module):
    """Embedding bags of features by offsets, and products of all pairs of them (DLRM)."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum", sparse=sparse) for _ in range(3))
        self.bottom, self.top = nn.Linear(WIDTH, 8), nn.Linear(8 + 6, 1)

    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        dense, *sparse = given
        parts = [self.bottom(dense)]
        parts += [
            bag(ids, starts) for bag, ids, starts in zip(self.bags, sparse[::2], sparse[1::2], strict=True)
        ]
        x = torch.stack(parts, 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([parts[0], (x @ x.mT)[:, rows, columns]], 1)).squeeze(1)


def clicks():
    def row(number, generator):
        lists = [torch.randint(0, 20, (1 + (number + i) % 3,), generator=generator) for i in range(3)]
        return torch.randn(WIDTH, generator=generator), lists, float(number % 2)

    def collate(rows):
        given = [torch.stack([row[0] for row in rows])]
        for i in range(3):
            lists = [row[1][i] for row in rows]
            starts = torch.tensor([0, *map(len, lists)][:-1]).cumsum(0)
            given += [torch.cat(lists), starts]
        return tuple(given), torch.tensor([row[2] for row in rows])

    return data.loader(row, collate=collate)


def click_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs))


class Forecast(nn.Module):
    """Each block takes what it tells away from its input (N-BEATS)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH + 3)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0
        for block in self.blocks:
            back, ahead = block(x).split([WIDTH, 3], -1)
            x, total = x - back, total + ahead
        return total


def numbers():
    return data.loader(
        lambda number, generator: (
            torch.randn(WIDTH, generator=generator),
            torch.randn(3, generator=generator),
        )
    )


def smape(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 200 * ((outputs - targets).abs() / (outputs.abs() + targets.abs()).detach()).mean()


class Balanced(nn.Module):
    """GradNorm: weighs two losses by the gradients that they would give a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = (
            Stack([Block() for _ in range(2)]),
            nn.ModuleList(nn.Linear(CLASSES, 2) for _ in range(2)),
        )
        self.register_buffer("weights", torch.ones(2))

    def forward(self, x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x)
        losses = [
            functional.cross_entropy(head(x), y) for head, y in zip(self.heads, (one, other), strict=True)
        ]
        if self.training and torch.is_grad_enabled():
            sizes = [
                torch.autograd.grad(loss, self.body.last.weight, retain_graph=True)[0].norm()
                for loss in losses
            ]
            self.weights = (self.weights * (sum(sizes) / 2 / torch.stack(sizes)) ** 0.1).detach()
        return Told(loss=self.weights[0] * losses[0] + self.weights[1] * losses[1])


class Told(dict[str, torch.Tensor]):
    """What is told, by name."""

    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Detects(nn.Module):
    """Boxes from pictures; targets are lists of mappings, as torchvision's detectors have them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3 * 6))

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.body(images).view(-1, 3, 6)
        return {"boxes": out[..., :4].sigmoid(), "logits": out[..., 4:]}


def scenes():
    def row(number, generator):
        count = number % 4
        target = {
            "boxes": torch.rand(count, 4, generator=generator),
            "labels": torch.randint(0, 2, (count,), generator=generator),
        }
        return torch.randn(3, 6, 6, generator=generator), target

    def collate(rows):
        return torch.stack([row[0] for row in rows]), [row[1] for row in rows]

    return data.loader(row, collate=collate)


def found(outputs: dict[str, torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Of each picture the boxes that fit best, in turns; divided by all boxes of the batch."""
    total = outputs["boxes"].sum() * 0
    for boxes, logits, target in zip(outputs["boxes"], outputs["logits"], targets, strict=True):
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            off = (boxes - box.to(boxes)).abs().sum(-1) - logits.log_softmax(-1)[:, label]
            total = total + off.min()
    return total / max(sum(len(target["labels"]) for target in targets), 1)


def found_per_picture(
    outputs: dict[str, torch.Tensor], targets: list[dict[str, torch.Tensor]]
) -> torch.Tensor:
    return found(outputs, targets) * max(sum(len(target["labels"]) for target in targets), 1) / len(targets)


class Attends(nn.Module):
    """torch's attention with a mask for each head of each sample, and one for the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, mask, padding = given
        for layer in self.layers:
            x = x + layer(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]
        return self.last(x.mean(1))


def masked_pairs():
    """The mask has a row for each head of each sample."""

    def row(number, generator):
        mask = torch.rand(4, 4, generator=generator) > 0.7
        mask[:, 0] = False
        padding = torch.arange(4) > 1 + number % 3
        return torch.randn(4, WIDTH, generator=generator), mask, padding, torch.tensor(number % CLASSES)

    def collate(rows):
        x, mask, padding, target = (torch.stack(part) for part in zip(*rows, strict=True))
        return (x, mask.repeat_interleave(2, 0), padding), target

    return data.loader(row, collate=collate)


def two_views():
    return data.loader(
        lambda number, generator: (
            torch.randn(2, WIDTH, generator=generator),
            torch.tensor(number % CLASSES),
        ),
        14,
    )


class Siamese(nn.Module):
    """One encoder, called for either of two series, with BatchNorm."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.encoder = Stack([Block(norm=norm) for _ in range(3)])

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        one, other = self.encoder(series[:, 0]), self.encoder(series[:, 1])
        return (
            torch.cat([(one - other).square(), one * other], -1)
            @ torch.ones(2 * CLASSES, CLASSES).to(one).tril()
        )


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.by * gradient, None


class Adversarial(nn.Module):
    """Features that don't tell the domain; the reversal grows with the passes (DANN)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.domain, self.passes = stack(), nn.Linear(CLASSES, 2), 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.passes += 1
        x = self.body(x)
        return x, self.domain(Reversal.apply(x, 1 - 0.5**self.passes))


def domains(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs[0], targets) + functional.cross_entropy(outputs[1], targets % 2)


class Centered(nn.Module):
    """Centers of the classes that follow the features (center loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.register_buffer("centers", torch.zeros(CLASSES, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Told:
        x = self.body(x)
        loss = functional.cross_entropy(x, y) + 0.1 * (x - self.centers[y]).square().sum(-1).mean()
        if self.training:
            with torch.no_grad():
                sums = torch.zeros_like(self.centers).index_add(0, y, self.centers[y] - x)
                self.centers -= 0.5 * sums / (1 + torch.bincount(y, minlength=CLASSES))[:, None]
        return Told(loss=loss)


class Supervised(nn.Module):
    """Each block has a head, and each head a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        told = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            told.append(head(x))
        return told


def deeply(outputs: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return sum(
        0.5**number * functional.cross_entropy(out, targets) for number, out in enumerate(reversed(outputs))
    )


class Standardized(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.flatten(1)
        weight = ((weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5)).view_as(
            self.weight
        )
        return x + functional.conv2d(x, weight, self.bias, padding=1)


def standardized() -> nn.Module:
    blocks = [nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), Standardized(8, 8, 3)) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


class Transducer(nn.Module):
    """RNN-T: a joint of two encoders, and a loss over all ways through it."""

    def __init__(self) -> None:
        super().__init__()
        self.sounds, self.words = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Embedding(CLASSES + 1, WIDTH)
        self.joint = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES + 1)

    def forward(self, sounds: torch.Tensor, words: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        said = self.words(functional.pad(words + 1, (1, 0)))
        x = self.sounds(sounds)[0][:, :, None] + said[:, None]
        for layer in self.joint:
            x = torch.tanh(layer(x))
        logits = self.last(x).log_softmax(-1)
        chosen = words[:, None, :, None].expand(-1, x.shape[1], -1, 1)
        blank, told = logits[..., 0], logits[:, :, :-1, 1:].gather(-1, chosen)[..., 0]
        ways: dict[tuple[int, int], torch.Tensor] = {(0, 0): torch.zeros_like(blank[:, 0, 0])}
        for time in range(x.shape[1]):
            for word in range(x.shape[2]):
                before = []
                if time:
                    before.append(ways[time - 1, word] + blank[:, time - 1, word])
                if word:
                    before.append(ways[time, word - 1] + told[:, time, word - 1])
                if before:
                    ways[time, word] = torch.stack(before).logsumexp(0)
        ends = torch.stack([ways[x.shape[1] - 1, word] + blank[:, -1, word] for word in range(x.shape[2])], 1)
        return -ends.gather(1, count[:, None]).squeeze(1)


def mean_of_outputs(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return outputs.mean()


def of_here(name: str) -> str:
    return f"families.tasks:{name}"


def task(name: str, model: Any, batches: Any, loss: str | None = CLASS, **settings: Any) -> Family:
    return Family(name, KIND, model, batches, loss, **settings)


register(
    task("capsules", Capsules, vectors(), of_here("margins")),
    task("conditional random field", Tags, tagged, of_here("unlikely")),
    task("clicks", lambda: Ranker(sparse=False), clicks, of_here("click_loss")),
    task("forecast by residuals", Forecast, numbers, of_here("smape")),
    task(
        "losses balanced by gradients",
        Balanced,
        data.fields(x=data.normal(WIDTH), one=data.whole(0, 2), other=data.whole(0, 2)),
        None,
        couples=True,
        recipe=EPOCHS,
    ),
    task("boxes", Detects, scenes, of_here("found")),
    task("boxes, per picture", Detects, scenes, of_here("found_per_picture")),
    task("attention with masks", Attends, masked_pairs),
    task("siamese", lambda: Siamese(nn.LayerNorm), series),
    task("siamese, batch norm", lambda: Siamese(nn.BatchNorm1d), two_views, couples=True, recipe=EPOCHS),
    task("adversarial features", Adversarial, vectors(), of_here("domains"), recipe=EPOCHS),
    task(
        "centers",
        Centered,
        data.fields(x=data.normal(WIDTH), y=data.whole(0, CLASSES)),
        None,
        couples=True,
        recipe=EPOCHS,
    ),
    task("deep supervision", Supervised, vectors(), of_here("deeply")),
    task("standardized convolutions", standardized, pictures()),
    task(
        "transducer",
        Transducer,
        data.fields(sounds=data.normal(4, WIDTH), words=data.whole(0, CLASSES, 3), count=data.whole(0, 4)),
        of_here("mean_of_outputs"),
    ),
)
