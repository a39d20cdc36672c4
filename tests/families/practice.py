"""Models as they are in use, with state in unusual places: masks, hooks, queues, teachers, observers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.nn import functional
from torch.nn.utils import prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import orthogonal
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from families.family import Family, register
from families.plain import CLASS, CLASSES, WIDTH, Block, Stack, pictures, series, stack, vectors

KIND = "practice"
EPOCHS = {"epochs": 2}


def pruned() -> nn.Module:
    """Half of the weights are masked, by torch's own pruning."""
    model = stack()
    for block in model.blocks:
        prune.l1_unstructured(block.up, "weight", 0.5)
    return model


def by_old_hooks() -> nn.Module:
    """Weights made by hooks before each pass, and an orthogonal one."""
    model = Stack([Block() for _ in range(3)])
    for block in model.blocks:
        old_weight_norm(block.up)
    orthogonal(model.last)
    return model


def by_old_power_iteration() -> nn.Module:
    model = Stack([Block() for _ in range(3)])
    for block in model.blocks:
        old_spectral_norm(block.up)
    return model


class InFloat(FakeQuantize):
    """Quantizes in float32, which is what torch can, whatever the model is in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.float()
        return super().forward(x.float()).to(x.dtype)


class Quantized(nn.Module):
    """Quantization-aware: observers that grow their buffers in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block()
        self.outputs = InFloat(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.weights = InFloat(
            MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights(self.body.up.weight)
        hidden = torch.relu(functional.linear(self.body.norm(x), weight, self.body.up.bias))
        return x + self.outputs(self.body.down(hidden))


class Contrasts(nn.Module):
    """MoCo: an encoder that follows, a queue of its keys, and a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Stack([Block() for _ in range(2)])
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(16, CLASSES), dim=-1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = functional.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            if self.training:
                for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
            keys = functional.normalize(self.key(x + 0.1), dim=-1)
        logits = torch.cat([(queries * keys).sum(-1, keepdim=True), queries @ self.queue.clone().T], 1)
        if self.training:
            self.queue[(self.place + torch.arange(len(keys))) % 16] = keys
            self.place += len(keys)
        return logits / 0.2


def first_is_right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, torch.zeros_like(targets))


class Distilled(nn.Module):
    """A frozen teacher that stays in evaluation mode, with dropout and BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student = stack()
        self.teacher = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, CLASSES)
        )
        self.teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            told = self.teacher(x)
        return self.student(x), told


def distillation(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    mine, told = ((out / 2).log_softmax(-1) for out in outputs)
    by_teacher = functional.kl_div(mine, told, reduction="batchmean", log_target=True)
    return 4 * by_teacher + functional.cross_entropy(outputs[0], targets)


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(3)
    TEACHER = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double().eval()


class Student(nn.Module):
    """Its teacher is a global of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            told = TEACHER(x.double()).to(x.dtype)
        return self.body(x), told


class FollowsSize:
    """A loss over a moving average of itself, which is a number of the object."""

    def __init__(self) -> None:
        self.size = 1.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs, targets)
        if torch.is_grad_enabled():
            self.size = 0.9 * self.size + 0.1 * float(loss.detach())
        return loss / self.size


follows_size = FollowsSize()


def with_a_fresh_loss() -> nn.Module:
    """What a new process would have."""
    follows_size.size = 1.0
    return stack()


class Adjoint(torch.autograd.Function):
    """An integration whose gradient is another, which computes the field anew (neural ODE)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, field: nn.Module, *weights: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + 0.25 * field(x)
        ctx.field, ctx.end = field, x
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weights = ctx.end, list(ctx.field.parameters())
        sums = [torch.zeros_like(weight) for weight in weights]
        for _ in range(4):
            with torch.enable_grad():
                here = x.detach().requires_grad_()
                field = ctx.field(here)
                back, *by_weight = torch.autograd.grad(field, [here, *weights], gradient)
            x, gradient = x - 0.25 * field.detach(), gradient + 0.25 * back
            sums = [one + 0.25 * other for one, other in zip(sums, by_weight, strict=True)]
        return gradient, None, *sums


class Flows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Adjoint.apply(x, self.field, *self.field.parameters())


class Equilibrium(nn.Module):
    """A fixed point, and the gradient of it by a hook that solves for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.inner.weight.mul_(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, x = torch.zeros_like(x), self.outer(x)
        with torch.no_grad():
            for _ in range(60):
                z = torch.tanh(self.inner(z) + x)
        z = torch.tanh(self.inner(z) + x)
        if torch.is_grad_enabled():
            start = z.detach().requires_grad_()
            again = torch.tanh(self.inner(start) + x.detach())

            def solve(gradient: torch.Tensor) -> torch.Tensor:
                found = gradient
                for _ in range(60):
                    found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
                return found

            z.register_hook(solve)
        return z


class Learner(nn.Module):
    """Learns from the first half of each sample's series by steps of its own, per sample (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        weights = dict(self.body.named_parameters())

        def off(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.body, weights, x).square().mean()

        def learn(x: torch.Tensor) -> torch.Tensor:
            gradients = torch.func.grad(off)(weights, x[:3])
            learnt = {name: weight - 0.1 * gradients[name] for name, weight in weights.items()}
            return torch.func.functional_call(self.body, learnt, x[3:]).mean(0)

        return torch.func.vmap(learn)(series)


class Ensemble(nn.Module):
    """Several models as one, by vmap over stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(members)
        self.stacked = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(weight.detach()) for name, weight in stacked.items()}
        )
        self.base = [members[0].to("meta")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name.replace("_", "."): weight for name, weight in self.stacked.items()}
        call = lambda own: torch.func.functional_call(self.base[0], own, x)  # noqa: E731
        return torch.func.vmap(call)(weights).mean(0)


class GhostNorm(nn.Module):
    """BatchNorm over a few samples at a time (TabNet)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(part) for part in x.chunk(-(-len(x) // 3))])


class Renorm(nn.BatchNorm1d):
    """BatchNorm that is pulled to its running statistics, more with every pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        mean, deviation = x.mean(0), x.std(0, unbiased=False) + self.eps
        with torch.no_grad():
            most = 1 + 0.1 * self.num_batches_tracked
            ratio = (deviation / self.running_var.sqrt()).clamp(1 / most, most)
            shift = ((mean - self.running_mean) / self.running_var.sqrt()).clamp(1 - most, most - 1)
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(deviation.square(), 0.1)
            self.num_batches_tracked += 1
        return ((x - mean) / deviation * ratio + shift) * self.weight + self.bias


def instance_norm() -> nn.Module:
    """Norms of each picture that keep track of all of them."""
    norms = [nn.InstanceNorm2d(8, affine=True, track_running_stats=True) for _ in range(2)]
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm, nn.ReLU()) for norm in norms]
    ends = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)),
    )
    return nn.Sequential(ends[0], *blocks, ends[1])


class Annealed(nn.Module):
    """Draws classes by a temperature that falls with each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.temperature = stack(), nn.Linear(CLASSES, CLASSES), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.9)
        return self.leave(functional.gumbel_softmax(self.enter(x), self.temperature))


class ScaledBack(nn.Module):
    """A hook of the backward pass keeps a mean of the gradients' sizes, which scales the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = stack(), nn.Linear(CLASSES, CLASSES)
        self.register_buffer("size", torch.ones(()))
        self.leave.register_full_backward_hook(self._keep)

    def _keep(self, module: nn.Module, into: Any, out: Any) -> None:
        self.size = 0.9 * self.size + 0.1 * out[0].norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x)) / self.size


class Averaged(nn.Module):
    """torch's average of the weights, moved in each pass, and asked for what it would say."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.average = AveragedModel(self.body, multi_avg_fn=get_ema_multi_avg_fn(0.9)).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.average.update_parameters(self.body)
        with torch.no_grad():
            told = self.average(x)
        return self.body(x), told


class NoisyLinear(nn.Linear):
    """Noise in the weights, drawn in each pass into buffers (NoisyNet)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.scale = nn.Parameter(torch.full((width, width), 0.1))
        self.register_buffer("noise", torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.noise.normal_()
        return x + torch.tanh(functional.linear(x, self.weight + self.scale * self.noise, self.bias))


def of_here(name: str) -> str:
    return f"families.practice:{name}"


def practice(name: str, model: Any, batches: Any, loss: str | None = CLASS, **settings: Any) -> Family:
    return Family(name, KIND, model, batches, loss, **settings)


register(
    practice("pruned", pruned, vectors()),
    practice("weights by old hooks", by_old_hooks, vectors()),
    practice("power iteration by old hooks", by_old_power_iteration, vectors(), couples=True, recipe=EPOCHS),
    practice(
        "quantization-aware",
        lambda: Stack([Quantized() for _ in range(3)]),
        vectors(),
        couples=True,
        single_precision=True,
        recipe=EPOCHS,
    ),
    practice("queue of keys", Contrasts, vectors(), of_here("first_is_right"), couples=True, recipe=EPOCHS),
    practice("frozen teacher", Distilled, vectors(), of_here("distillation")),
    practice("teacher beside the model", Student, vectors(), of_here("distillation")),
    practice(
        "loss over its moving average",
        with_a_fresh_loss,
        vectors(),
        of_here("follows_size"),
        couples=True,
        recipe=EPOCHS,
    ),
    practice("neural ode", lambda: Stack([Flows() for _ in range(3)]), vectors()),
    practice("equilibrium", lambda: Stack([Equilibrium() for _ in range(2)]), vectors()),
    practice("learns to learn", Learner, series),
    practice("ensemble by vmap", Ensemble, vectors()),
    practice(
        "ghost batch norm",
        lambda: Stack([Block(norm=GhostNorm) for _ in range(2)]),
        vectors(14),
        couples=True,
    ),
    practice(
        "batch renorm",
        lambda: Stack([Block(norm=Renorm) for _ in range(2)]),
        vectors(14),
        couples=True,
        recipe=EPOCHS,
    ),
    practice("instance norm", instance_norm, pictures(), couples=True, recipe=EPOCHS),
    practice("annealed draws", Annealed, vectors(), random=True, couples=True, recipe=EPOCHS),
    practice("scaled by gradients", ScaledBack, vectors(), couples=True, recipe=EPOCHS),
    practice("averaged weights", Averaged, vectors(), of_here("distillation"), couples=True, recipe=EPOCHS),
    practice(
        "noisy weights",
        lambda: Stack([NoisyLinear(WIDTH) for _ in range(3)]),
        vectors(),
        random=True,
        couples=True,
    ),
)
