"""Models and optimizers that are made of others, lazy, or given rows that pack several."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from families import data
from families.family import Family, register
from families.plain import CLASSES, WIDTH, Block, Stack, stack, vectors

KIND = "composed"


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow fast ones every second step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.fast = torch.optim.SGD([p for group in self.param_groups for p in group["params"]], lr=lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.fast.param_groups[0]["params"]:
            if "slow" not in self.state[p]:
                self.state[p]["slow"] = p.detach().clone()
        self.fast.step()
        self.count += 1
        if self.count % 2 == 0:
            for p in self.fast.param_groups[0]["params"]:
                slow = self.state[p]["slow"]
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class LayerwiseClip(torch.optim.SGD):
    """Adaptive gradient clipping: by the norm of rows of the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim == 2:
                    norm = p.norm(dim=1, keepdim=True).clamp(min=1e-3)
                    most = 0.1 * norm / p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
                    p.grad.mul_(most.clamp(max=1.0))
        return super().step(closure)


class Lars(torch.optim.Optimizer):
    """Steps by the ratio of the norms of a tensor and of its gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / p.grad.norm().clamp(min=1e-6)
                    p.add_(p.grad * ratio, alpha=-group["lr"])


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LazyLinear(16), nn.LazyLinear(CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def lazy() -> nn.Module:
    model = Lazy()
    model(torch.zeros(2, WIDTH))
    return model


class Wrapped(nn.Module):
    """An encoder that another module holds, with a head that is a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack([Block() for _ in range(2)])
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(CLASSES), "out": nn.Linear(CLASSES, CLASSES)})
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        for part in self.head.values():
            hidden = part(hidden)
        return hidden / self.temperature


class Rebuilds(nn.Module):
    """Normalizes its weights in place before each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.proxies.data = functional.normalize(self.proxies.data, dim=1)
        return self.body(x) @ self.proxies.T


class Noisy(nn.Module):
    """Seeds torch itself in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        scale = 1 + 0.1 * torch.rand(x.shape[1], dtype=x.dtype)
        return self.body(x * scale)


class Retains(nn.Module):
    """Penalizes the gradient of its outputs by its inputs (as WGAN-GP and physics-informed networks do)."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return {"u": u.squeeze(-1), "du": du}


def physics_loss(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    residual = outputs["du"].sum(-1) + outputs["u"] - targets.to(outputs["u"])
    return residual.square().mean()


def packed_rows() -> Any:
    """One row with several sequences, told apart by their positions."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for number in range(3):
        lengths = [3 + number, 5, 4]
        tokens = torch.cat([data.ids(generator, length) for length in lengths])
        positions = torch.cat([torch.arange(length) for length in lengths])
        labels = tokens.clone()
        labels[positions == 0] = -100
        rows.append({"input_ids": tokens[None], "position_ids": positions[None], "labels": labels[None]})
    return data.Stream(rows)


def packed_llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=data.VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=32,
        use_cache=False,  # else transformers does not tell the sequences of a row apart
    )
    return LlamaForCausalLM(config)


class LossWithWeights(nn.Module):
    """Weighs two losses by numbers that are buffers, and follows their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(2))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        one = functional.cross_entropy(outputs, targets)
        other = outputs.square().mean()
        if torch.is_grad_enabled():
            now = torch.stack([one.detach(), other.detach()]).to(self.sizes)
            self.sizes = 0.9 * self.sizes + 0.1 * now
        return one / self.sizes[0] + other / self.sizes[1]


balanced_loss = LossWithWeights()


def balanced() -> nn.Module:
    global balanced_loss
    balanced_loss = LossWithWeights()
    return stack()


def dense(number: int, generator: torch.Generator) -> Any:
    return torch.randn(WIDTH, generator=generator), torch.randint(0, CLASSES, (), generator=generator)


def sparse_rows(rows: list[Any]) -> Any:
    x = torch.stack([row[0] for row in rows])
    return (x * (x > 0)).to_sparse(), torch.stack([row[1] for row in rows])


class Sparse(nn.Module):
    """Takes sparse features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 16) / 4)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(torch.sparse.mm(x, self.weight)))


CLASS = "families.plain:class_loss"


def with_optimizer(name: str, kind: str, **recipe: Any) -> Family:
    chosen = {"optimizer": f"families.composed:{kind}", "optimizer_args": {}, **recipe}
    return Family(name, KIND, stack, vectors(), CLASS, recipe=chosen)


register(
    with_optimizer("lookahead", "Lookahead"),
    with_optimizer("adaptive clipping", "LayerwiseClip", clip_grad_norm=None),
    with_optimizer("lars", "Lars"),
    Family("lazy layers", KIND, lazy, vectors(), CLASS),
    Family("a module in a module", KIND, Wrapped, vectors(), CLASS),
    Family("normalizes its weights in place", KIND, Rebuilds, vectors(), CLASS),
    Family("seeds torch itself", KIND, Noisy, vectors(), CLASS),
    Family("physics-informed", KIND, Retains, vectors(), "families.composed:physics_loss"),
    Family("llama, packed rows", KIND, packed_llama, packed_rows, single_precision=True),
    Family("losses balanced by their sizes", KIND, balanced, vectors(), "families.composed:balanced_loss"),
    Family("sparse inputs", KIND, Sparse, lambda: data.loader(dense, collate=sparse_rows), CLASS),
)
