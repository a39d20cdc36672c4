"""Models, optimizers and a plain loop that know nothing of Saturn: what odd jobs are held against."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def vectors(samples: int = 18, batch_size: int = 6, width: int = 8) -> DataLoader[Any]:
    """Random vectors and classes, as pairs, in order; the last batch may be smaller."""
    generator = torch.Generator().manual_seed(5)
    rows = [
        (torch.randn(width, generator=generator), torch.randint(0, 5, (), generator=generator))
        for _ in range(samples)
    ]
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


def images(samples: int = 12, batch_size: int = 6) -> DataLoader[Any]:
    """Random images of three channels and classes, as pairs, in order."""
    generator = torch.Generator().manual_seed(6)
    rows = [
        (torch.randn(3, 6, 6, generator=generator), torch.randint(0, 5, (), generator=generator))
        for _ in range(samples)
    ]
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


def words(samples: int = 16, batch_size: int = 6) -> DataLoader[Any]:
    """Random words and classes, as pairs, in order."""
    generator = torch.Generator().manual_seed(7)
    rows = [
        (torch.randint(0, 20, (4,), generator=generator), torch.randint(0, 5, (), generator=generator))
        for _ in range(samples)
    ]
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


def class_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chain(nn.Module):
    """Layers in a row."""

    def __init__(self, blocks: list[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.start = nn.Linear(8, width)
        self.blocks = nn.ModuleList(blocks)
        self.end = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def chain(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Chain([Block(8) for _ in range(depth)])


class Called(Chain):
    """What it computes depends on how often it was called, which an attribute counts."""

    tp_plan = MappingProxyType({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


def called() -> nn.Module:
    torch.manual_seed(0)
    return Called([Block(8) for _ in range(3)])


class Counting(torch.optim.Optimizer):
    """A step that shrinks with a counter and grows with a sum, both kept in the group."""

    def __init__(self, params: Any, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.5)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "step": 0, "total": torch.zeros(2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            group["total"] = group["total"] + group["lr"] * torch.tensor([1.0, 2.0])
            group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])
            rate = group["lr"] * (1 + group["total"][1].item()) / group["step"] + group["betas"][0] * 1e-2
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


class CountsUnderNames(torch.optim.Optimizer):
    """Steps that shrink with what is kept of no parameter in particular; groups have no learning rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"rate": lr})
        self.state["k"] = torch.zeros(1)  # type: ignore[index]
        self.state["scale"] = 1.0  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state: Any = self.state
        state["k"].add_(1)
        state["scale"] *= 0.9
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["rate"] * state["scale"] / state["k"].item()
                    parameter.add_(parameter.grad, alpha=-rate)


class Clipped(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class Estimating(torch.optim.Optimizer):
    """Steps by signs, of a size that is estimated from all parameters, as Prodigy does (Mishchenko, 2023)."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "above": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        d, above, below = self.param_groups[0]["d"], self.param_groups[0]["above"], 0.0
        pairs = [(group["lr"], p) for group in self.param_groups for p in group["params"]]
        for lr, p in pairs:
            state = self.state[p]
            if not state:
                state["first"], state["sum"] = p.clone(), torch.zeros_like(p)
            above += d * lr * (p.grad * (state["first"] - p)).sum().item()
            below += state["sum"].add_(p.grad, alpha=d * lr).abs().sum().item()
        d = max(d, above / below if below else 0.0)
        for lr, p in pairs:
            p.sub_(p.grad.sign(), alpha=d * lr)
        for group in self.param_groups:
            group["d"], group["above"] = d, above


class Storing(nn.Module):
    """A model with all kinds of buffers, whose weights lie in memory in uncommon ways."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 5)
        self.turned = nn.Parameter(torch.randn(5, 8).t())
        self.register_buffer("mask", torch.arange(8) % 2 == 0)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("waves", torch.ones(3, dtype=torch.complex128))
        self.register_buffer("spread", torch.ones(1, dtype=torch.float64).expand(4))
        self.register_buffer("part", torch.zeros(6, dtype=torch.float64)[:3])
        self.register_buffer("few", torch.eye(3, dtype=torch.float64).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mask = ~self.mask
            self.count += 1
            self.waves *= 1j
            self.spread = self.spread[:1].mul(1.5).expand(4)
            self.part += 1
            self.few = self.few * 2
        return self.line(x * self.mask) + x @ self.turned * self.waves.real.sum() * self.part[0]


def storing() -> nn.Module:
    torch.manual_seed(0)
    return Storing()


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3)
        self.end = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(torch.relu(self.again(torch.relu(self.conv(x)))).mean((2, 3)))


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    return Pictures().to(memory_format=torch.channels_last)


class Experts(nn.Module):
    """A mixture in which each sample goes to one expert; the experts may be of different widths."""

    def __init__(self, width: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.gate = nn.Linear(width, len(hidden))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, size), nn.Tanh(), nn.Linear(size, width)) for size in hidden
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x)[:, : len(self.experts)].softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                y[rows] = expert(x[rows])
        return x + y * weights[:, None]


def experts(*hidden: int, idle: bool = False) -> nn.Module:
    """A mixture of experts of these widths; where ``idle``, the last is never chosen."""
    torch.manual_seed(3)
    layers = [Experts(8, hidden) for _ in range(2)]
    if idle:
        with torch.no_grad():
            for layer in layers:
                layer.gate.bias[-1] = -1e6
    return Chain(list(layers))


def equal_experts() -> nn.Module:
    return experts(6, 6, 6, 6)


def unequal_experts() -> nn.Module:
    return experts(3, 5, 7, 9, idle=True)


class Only(nn.Module):
    """One mixture whose experts are the longest list of blocks there is."""

    def __init__(self, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.mixture = Experts(8, hidden)
        self.end = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.mixture(self.start(x)))


def only_experts() -> nn.Module:
    torch.manual_seed(4)
    return Only((6, 6, 6))


class Skipping(Chain):
    """Computes each block for some samples, and not at all where there are none of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depths = (x[:, 0] * 1000).long().abs()
        x = self.start(x)
        for number, block in enumerate(self.blocks):
            rows = depths % (number + 2) == 0
            if rows.any():
                x = x.index_put((rows,), block(x[rows]))
        return self.end(x)


def skipping() -> nn.Module:
    torch.manual_seed(0)
    return Skipping([Block(8) for _ in range(4)])


class Odd(Chain):
    """A scalar, a parameter that is never used, a frozen one, and an embedding used as a matrix."""

    def __init__(self) -> None:
        super().__init__([Block(8) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[0].scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.randn(3, 3))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.names = nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x) * self.scale + self.frozen
        for block in self.blocks:
            x = block(x)
        return self.end(x) + x @ self.names.weight.t()


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


class Again(Chain):
    """Goes through its blocks twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.end(x)


def again() -> nn.Module:
    torch.manual_seed(0)
    return Again([Block(8) for _ in range(2)])


def family(name: str, **changes: Any) -> nn.Module:
    """A tiny model of transformers for sequences of words, by the name of its class without ForCausalLM."""
    import transformers

    config = getattr(transformers, name.replace("Gemma3", "Gemma3Text") + "Config")(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        **changes,
    )
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    if hasattr(config, "base_model_ep_plan") and config.base_model_ep_plan:
        model.set_experts_implementation("eager")  # the other knows no float64
    return model  # type: ignore[no-any-return]


def sentences(samples: int = 10, batch_size: int = 4) -> DataLoader[Any]:
    """Random words, and the next ones as labels, in order."""
    generator = torch.Generator().manual_seed(8)
    rows = [torch.randint(3, 40, (7,), generator=generator) for _ in range(samples)]
    return DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=batch_size)  # type: ignore[arg-type]


def next_word_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class Headed(nn.Module):
    """Heads that are normed by one weight for all, between layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(3)
        self.gate = nn.Parameter(torch.zeros(3))
        self.down = nn.Linear(12, 8)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(self.before(x)).unflatten(-1, (-1, 3))
        return x + self.down((torch.tanh(self.norm(heads)) * (1 + self.gate)).flatten(-2))


def headed() -> nn.Module:
    torch.manual_seed(0)
    model = Chain([Headed() for _ in range(2)])
    model.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # type: ignore[assignment]
    return model


class WordedBlock(Block):
    def __init__(self, width: int, words: nn.Embedding) -> None:
        super().__init__(width)
        self.words = words

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + self.words(words).mean(1)


class Worded(nn.Module):
    """Sparse embeddings before and in blocks; where ``shared``, all are one."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=True)
        own = (self.words if shared else nn.Embedding(20, 8, sparse=True) for _ in range(2))
        self.blocks = nn.ModuleList(WordedBlock(8, words) for words in own)
        self.end = nn.Linear(8, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words).mean(1)
        for block in self.blocks:
            x = block(x, words)
        return self.end(x)


def worded(shared: bool = False, only: bool = False) -> nn.Module:
    """A model with sparse embeddings; where ``only``, nothing else is trained."""
    torch.manual_seed(0)
    model = Worded(shared)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not only or "words" in name)
    return model


@dataclass
class Held:
    """A result, or one that holds it."""

    value: Any


class Holding(Block):
    """Returns its result in an object of an object."""

    def forward(self, x: Any) -> Any:
        return Held(Held(super().forward(x.value.value if isinstance(x, Held) else x)))


def holding() -> nn.Module:
    torch.manual_seed(0)
    model = Chain([Holding(8) for _ in range(3)])
    model.end.register_forward_pre_hook(lambda end, args: args[0].value.value)
    return model
