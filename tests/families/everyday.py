"""What people train: losses that are means over something of their own, and modules that remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from families.everyday_batches import CLASSES, LENGTH, WIDTH, graphs, rows, told
from families.family import Family, register


class Body(nn.Module):
    """Blocks between two layers; takes what it needs of a batch."""

    def __init__(self, out: int = CLASSES, block: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList((block or Residual)() for _ in range(3))
        self.last = nn.Linear(WIDTH, out)

    def forward(self, x, **unused):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class UNet(nn.Module):
    """Goes down and up again, with skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(LENGTH, LENGTH, 3, padding=1) for _ in range(2))
        self.up = nn.ModuleList(nn.Conv1d(2 * LENGTH, LENGTH, 3, padding=1) for _ in range(2))
        self.last = nn.Conv1d(LENGTH, 1, 1)

    def forward(self, x, **unused):
        skips = []
        for layer in self.down:
            skips.append(x)
            x = functional.avg_pool1d(functional.gelu(layer(x)), 2)
        for layer in self.up:
            x = layer(torch.cat([functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.last(x).mean((1, 2))


class Diffusion(Body):
    """Draws a time and noise for each sample, and returns the noise that it missed."""

    def forward(self, x, **unused):
        x = x.mean(1)
        time = torch.randint(1, 10, (len(x), 1)).to(x) / 10
        noise = torch.randn_like(x)
        return super().forward((1 - time) * x + time * noise) - noise.mean(1, keepdim=True)


class Averaged(Body):
    """Keeps a moving average of its weights, which a forward pass moves, and stays near to it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def forward(self, x, **unused):
        if self.training:
            with torch.no_grad():
                self.average.weight.lerp_(self.last.weight, 0.1)
        return super().forward(x.mean(1)) + self.average(x.mean(1))


class Quantized(Body):
    """A codebook of buffers that follow what is near to them (VQ-VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))

    def forward(self, x, **unused):
        z = self.first(x.mean(1))
        nearest = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                for code in nearest.unique():
                    self.codes[code].lerp_(z[nearest == code].mean(0), 0.3)
        return self.last(z + (self.codes[nearest] - z).detach())


class Graph(Body):
    """Sums over neighbours, and means over graphs."""

    def forward(self, nodes, edges, whose, **unused):
        x = self.first(nodes)
        for block in self.blocks:
            x = block(x.index_add(0, edges[1], x[edges[0]]))
        size = int(whose.max()) + 1
        total = x.new_zeros(size, WIDTH).index_add(0, whose, x)
        return self.last(total / torch.bincount(whose, minlength=size)[:, None])


class Heads(Body):
    """Several outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 3)
        self.log_variance = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, x, **unused):
        tokens = super().forward(x)
        return {
            "tokens": tokens,
            "classes": tokens.mean(1),
            "numbers": self.score(x.mean(1)),
            "log_variance": self.log_variance,
        }


class Packed(nn.Module):
    """A GRU over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, length, **unused):
        _, hidden = self.gru(pack_padded_sequence(x, length.cpu(), batch_first=True, enforce_sorted=False))
        return self.last(hidden[-1])


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients pass."""

    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)


class Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + functional.linear(x, Straight.apply(self.layer.weight), self.layer.bias)


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, **unused):
        coded = torch.tanh(self.encode(x.mean(1)))
        return functional.linear(coded, self.encode.weight.T, self.bias)[:, :3]


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Parametrized(Residual):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.layer, "weight", Symmetric())


class Waves(nn.Module):
    """Weights of a spectrum are complex (FNO)."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cdouble))

    def forward(self, x):
        return x + torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=WIDTH)


class Counting(Residual):
    """Counts its passes in a buffer of whole numbers, and warms up by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.passes += 1
        return x + torch.tanh(self.layer(x)) / (1 + self.passes)


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Structured(Body):
    """Returns a dataclass of its own."""

    def forward(self, x, one, **unused):
        logits = super().forward(x.mean(1))
        return Output(cross_entropy(logits, one), logits)


class Told(Body):
    def forward(self, names, extra, pairs, **unused):
        assert extra is None
        assert all(name.startswith("sample") for name in names)
        return super().forward(torch.stack([x for x, _ in pairs]))


class Checkpointed(Residual):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Compiled(Body):
    """Compiles a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager", fullgraph=True)

    def forward(self, x, **unused):
        return super().forward(self.mix(x.mean(1)))


class Hooked(Body):
    """A hook notes activations, of which the model returns a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[torch.Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.noted.append(output))

    def forward(self, x, **unused):
        self.noted.clear()
        logits = super().forward(x.mean(1))
        return logits + 0.1 * sum(noted.mean(1, keepdim=True) for noted in self.noted)


class Normalizing(Body):
    """Divides by a running mean that is a mere attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x, **unused):
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * float(x.detach().abs().mean())
        return super().forward(x.mean(1) / self.scale)


class Stateful(nn.Module):
    """Goes on from the state that the last batch left, of which it takes the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x, **unused):
        hidden = self.cell(x.mean(1), self.state.expand(len(x), -1))
        if self.training:
            self.state = hidden.detach().mean(0)
        return self.last(hidden)


class Thawing(Body):
    """Trains its first layer from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x, **unused):
        x = self.first(x.mean(1))
        x = x if self.seen else x.detach()
        if self.training:
            self.seen += 1
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Adaptive(Body):
    """Its softmax has clusters, and computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 10, [4, 7])

    def forward(self, x, one, **unused):
        return Output(self.softmax(self.first(x.mean(1)), one * 3).loss, x)


class Mean(Body):
    """One vector for each sample."""

    def forward(self, x, **unused):
        return super().forward(x.mean(1))


class Sized(Mean):
    """Divides by the number of samples."""

    def forward(self, x, **unused):
        return super().forward(x) / len(x)


class Listed(Mean):
    """Has parameters in lists and mappings, beside modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(3))
        self.shifts = nn.ParameterDict({"a": torch.zeros(WIDTH)})

    def forward(self, x, **unused):
        x = x * self.scales[0] * self.scales[2] + self.shifts["a"]
        return super().forward(x)


def body(block: Any = Residual, cls: Any = Mean):
    return lambda: cls(block=block)


HERE = "families.everyday_losses:"
#: By name: the model, its loss, its data, and what else the family is.
EVERYDAY: dict[str, tuple[Any, str | None, Any, dict[str, Any]]] = {
    "unet": (UNet, "first_number", rows(), {}),
    "diffusion, times drawn in the model": (lambda: Diffusion(1), "squares", rows(), {"random": True}),
    "moving average in the model": (Averaged, "one", rows(), {"couples": True}),
    "vq-vae": (Quantized, "one", rows(), {"couples": True}),
    "graphs": (Graph, "target", graphs, {}),
    "several losses": (Heads, "two_heads", rows(), {}),
    "several losses, uncertain": (Heads, "several", rows(), {}),
    "packed sequences": (Packed, "one", rows(), {}),
    "smoothed labels, weighed classes": (Body, "smoothed", rows(), {}),
    "a share without labels": (Body, "tokens", rows(ignored=True), {}),
    "a function of its own": (body(Binary), "one", rows(), {"couples": True}),
    "autoencoder, tied": (Tied, "numbers", rows(), {}),
    "parametrized": (body(Parametrized), "one", rows(), {}),
    "complex weights": (body(Waves), "one", rows(), {}),
    "counts its passes": (body(Counting), "one", rows(), {"couples": True}),
    "returns a dataclass": (Structured, None, rows(), {}),
    "strings and nothing": (Told, "target", told, {}),
    "checkpoints of its own": (body(Checkpointed), "one", rows(), {}),
    "compiles a part": (Compiled, "one", rows(), {}),
    "hooks that note": (Hooked, "one", rows(), {}),
    "running mean in an attribute": (Normalizing, "one", rows(), {"couples": True}),
    "state of the last batch": (Stateful, "one", rows(), {"couples": True}),
    "thawing": (Thawing, "one", rows(), {"couples": True}),
    "adaptive softmax": (Adaptive, None, rows(), {}),
    "divided by samples": (Sized, "one", rows(), {"couples": True}),
    "parameters in lists": (Listed, "one", rows(), {}),
    "gaussian likelihood": (Mean, "gaussian", rows(), {}),
    "focal loss": (Body, "focal", rows(), {"couples": True}),
    "dice loss": (Body, "dice", rows(), {"couples": True}),
    "weighed samples": (Mean, "weighed", rows(), {"couples": True}),
    "a sum over samples": (Mean, "added_up", rows(), {}),
    "perplexity": (Mean, "perplexity", rows(), {"couples": True}),
    "root of squares": (Mean, "root", rows(), {"couples": True}),
    "a mean over a mask": (Body, "masked_mean", rows(), {"couples": True}),
    "variances of a batch": (Mean, "variances", rows(14), {"couples": True}),
    "hardest samples": (Mean, "hardest", rows(), {"couples": True}),
}
register(
    *(
        Family(name, "everyday", model, batches, HERE + loss if loss else None, **more)
        for name, (model, loss, batches, more) in EVERYDAY.items()
    )
)
