"""Jobs that are like no other family: graphs, diffusion, proxies, packed series, fake quantization."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from families import data
from families.family import register
from families.plain import CLASSES, WIDTH, Block, Stack, pictures, plain, vectors


class Graph(nn.Module):
    """Messages between the nodes of padded graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        mask = there.to(nodes)[..., None]
        x = self.enter(nodes) * mask
        weights = edges.to(nodes) * mask * mask.transpose(1, 2)
        degree = weights.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            x = x + torch.relu(layer(torch.cat([x, weights @ x / degree], -1))) * mask
        return self.head(x.sum(1) / mask.sum(1).clamp(min=1))


def graph_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(outputs, batch["labels"])


def graphs():
    def row(number, generator):
        return {
            "nodes": torch.randn(5, WIDTH, generator=generator),
            "edges": torch.randint(0, 2, (5, 5), generator=generator),
            "there": torch.arange(5) < 2 + number % 4,
            "labels": torch.randint(0, CLASSES, (), generator=generator),
        }

    return data.loader(row)


class UNet(nn.Module):
    """A small one with time steps, as for diffusion; the noise comes with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)])

    def forward(self, noisy: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-torch.arange(4, device=noisy.device, dtype=noisy.dtype))
        angles = timestep.to(noisy)[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None]
        skip = functional.silu(self.down[0](noisy))
        x = functional.silu(self.down[1](skip)) + time
        x = functional.silu(self.norm(self.middle(x)))
        return self.up[1](torch.cat([self.up[0](x), skip], 1))


def noisy_pictures():
    def row(number, generator):
        clean, noise = torch.randn(2, 3, 6, 6, generator=generator)
        step = torch.randint(0, 10, (), generator=generator)
        level = (step + 1) / 11
        return {"noisy": clean * (1 - level) + noise * level, "timestep": step, "labels": noise}

    return data.loader(row)


def noise_loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weighed by the step, per sample."""
    per_sample = (outputs - batch["labels"]).square().mean((1, 2, 3))
    return (per_sample / (1 + batch["timestep"])).mean()


class Packed(nn.Module):
    """A packed series, sorted by its length within the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, series: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(series, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        last = outputs[torch.arange(len(series)), lengths - 1]
        return self.head(last)


def ragged():
    def row(number, generator):
        return {
            "series": torch.randn(6, WIDTH, generator=generator),
            "lengths": torch.tensor(1 + (3 * number) % 6),
            "labels": torch.randint(0, CLASSES, (), generator=generator),
        }

    return data.loader(row)


class Proxies(nn.Module):
    """Metric learning: similarities to learned proxies, with a margin where the class is known."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack([Block() for _ in range(2)])
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 8 * functional.normalize(self.body(x)) @ functional.normalize(self.proxies).T


def margin_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    known = functional.one_hot(targets, CLASSES).to(outputs)
    return functional.cross_entropy(outputs - 0.4 * known, targets)


class Heads(nn.Module):
    """Two heads; of a sample either's label may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack([Block() for _ in range(2)])
        self.classes, self.value = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x)
        return {"classes": self.classes(x), "value": self.value(x)[:, 0]}


def partly_labelled():
    def row(number, generator):
        kind = torch.randint(0, CLASSES, (), generator=generator)
        value = torch.randn((), generator=generator)
        return {
            "x": torch.randn(WIDTH, generator=generator),
            "kind": kind if number % 2 else torch.tensor(-100),
            "labels": value if number % 3 else torch.tensor(float("nan")),
        }

    return data.loader(row)


class HeadsByName(Heads):
    def forward(self, x: torch.Tensor, kind: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(x)


def heads_loss(outputs: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the samples of what is known of each."""
    kinds = functional.cross_entropy(outputs["classes"], batch["kind"], reduction="none", ignore_index=-100)
    known = ~batch["labels"].isnan()
    off = torch.where(known, outputs["value"] - batch["labels"].nan_to_num(), 0.0).square()
    return (kinds + 0.5 * off).mean()


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


class FakeQuantized(nn.Module):
    """Weights in 8 bits by their largest, and outputs by a running largest that forward passes change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.linear.weight.detach().abs().amax() / 127
        weight = Rounded.apply(self.linear.weight, scale)
        x = functional.linear(x, weight, self.linear.bias)
        if self.training:
            with torch.no_grad():
                self.largest = torch.maximum(self.largest * 0.99, x.detach().abs().amax())
        return torch.tanh(Rounded.apply(x, self.largest / 127))


class Averaged(nn.Module):
    """A teacher that follows the student within the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Stack([Block() for _ in range(2)]), Stack([Block() for _ in range(2)])
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            with torch.no_grad():
                for mean, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mean.mul_(0.9).add_(now, alpha=0.1)
        with torch.no_grad():
            target = self.teacher(x + 0.1)
        return self.student(x), target


def distillation(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    student, teacher = outputs
    divergence = functional.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return functional.cross_entropy(student, targets) + divergence


class Mixer(nn.Module):
    """Patches that are mixed by a matrix of their own, with layers that are scaled by a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.tokens = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.channels = nn.ModuleList(Block() for _ in range(3))
        self.scales = nn.ParameterList(torch.tensor(0.3) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for tokens, channels, scale in zip(self.tokens, self.channels, self.scales, strict=True):
            x = x + scale * tokens(x.transpose(1, 2)).transpose(1, 2)
            x = channels(x)
        return self.head(x.mean(1))


def _loss(name: str) -> str:
    return f"families.unseen:{name}"


register(
    plain("graph of padded nodes", Graph, graphs, _loss("graph_loss")),
    plain("u-net with time steps", UNet, noisy_pictures, _loss("noise_loss")),
    plain("lstm, packed", Packed, ragged, _loss("graph_loss")),
    plain("proxies with a margin", Proxies, vectors(), _loss("margin_loss")),
    plain("two heads, labels missing", HeadsByName, partly_labelled, _loss("heads_loss")),
    plain("fake quantized", lambda: Stack([FakeQuantized() for _ in range(2)]), vectors(), couples=True),
    plain("teacher that follows", Averaged, vectors(), _loss("distillation"), couples=True),
    plain("mixer", Mixer, pictures()),
)
