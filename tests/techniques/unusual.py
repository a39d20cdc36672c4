"""Models that do more in a forward pass than compute layer after layer: what Saturn must train, or refuse."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from odd import Block, Chain
from torch import nn
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.functional import cross_entropy, kl_div, normalize
from unusual_parts import Checkpointed, CheckpointedInside, backward_hooks
from unusual_registry import DEPTH, MODELS, blocks, unusual
from unusual_registry import model as model


def prediction_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Of the prediction, and of whatever else a model returns for it, as many losses as samples."""
    predicted, *penalties = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = cross_entropy(predicted, targets)
    for penalty in penalties:
        loss = loss + penalty.mean()
    return loss


def gradient_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Punishes how much the prediction depends on the inputs."""
    predicted, inputs = outputs
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(predicted.sum(), inputs, create_graph=True)
    return cross_entropy(predicted, targets) + slope.square().sum(-1).mean()


@unusual("gradient penalty in the loss")
class PenalisedOutside(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            return super().forward(x), x


@unusual("gradient penalty in the model")
class PenalisedInside(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            predicted = super().forward(x)
            (slope,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)
        return predicted, slope.square().sum(-1)


@unusual("gradient penalty while training")
class PenalisedInTraining(Chain):
    """A penalty in training alone, which needs gradients to be recorded."""

    def forward(self, x: torch.Tensor) -> Any:
        if not self.training:
            return super().forward(x)
        x = x.clone().requires_grad_()
        predicted = super().forward(x)
        (slope,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)
        return predicted, slope.square().sum(-1)


@unusual("gradient penalty where gradients are recorded")
class PenalisedWhenRecorded(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(x)
        x = x.clone().requires_grad_()
        predicted = super().forward(x)
        (slope,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)
        return predicted, slope.square().sum(-1)


@unusual("a forecast that is a gradient")
class Forces(Chain):
    """An energy by the layers, of which only the gradient is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = super().forward(x).square().sum()
            return -torch.autograd.grad(energy, x, create_graph=True)[0][:, :5]


@unusual("a step on weights within a step")
class Inner(Chain):
    """Predicts with weights that have taken one step of gradient descent (MAML)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            predicted = super().forward(x)
            weights = dict(self.end.named_parameters())
            slopes = torch.autograd.grad(
                predicted.square().mean(-1).sum(), list(weights.values()), create_graph=True
            )
        slopes = [slope / len(x) for slope in slopes]
        moved = {name: p - 0.1 * s for (name, p), s in zip(weights.items(), slopes, strict=True)}
        h = self.start(x)
        for block in self.blocks:
            h = block(h)
        return functional_call(self.end, moved, (h,))


@unusual("inputs moved against the gradient")
class Adversarial(Chain):
    """Trains on inputs that were moved towards a larger loss (FGSM)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        with torch.enable_grad():
            moved = x.detach().clone().requires_grad_()
            loss = super().forward(moved).logsumexp(-1).sum()
            (slope,) = torch.autograd.grad(loss, moved)
        return super().forward(x + 0.1 * slope.sign())


@unusual("two passes through all layers")
class Twice(Chain):
    """Two views of each sample, whose predictions are to agree (R-Drop)."""

    def forward(self, x: torch.Tensor) -> Any:
        one, other = super().forward(x), super().forward(0.9 * x)
        agree = kl_div(one.log_softmax(-1), other.softmax(-1), reduction="none").sum(-1)
        return one, agree


@unusual("calls itself")
class Nested(Chain):
    """The model is called within its own forward, hooks and all."""

    depth = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.depth:
            return super().forward(x)
        self.depth = 1
        try:
            return super().forward(x) + 0.5 * self(0.9 * x)
        finally:
            self.depth = 0


KEPT: list[Any] = []


def kept_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the prediction, and of what a module-level list holds of it."""
    punished = sum(h.square().mean(-1).mean() for h in KEPT)
    KEPT.clear()
    return cross_entropy(outputs, targets) + 0.1 * punished


@unusual("activations kept elsewhere")
class Keeps(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
            KEPT.append(x)
        return self.end(x)


def called_again_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Calls the model, which came with its outputs, on other inputs."""
    predicted, again = outputs
    return cross_entropy(predicted, targets) + 0.5 * cross_entropy(again(), targets)


@unusual("called again by the loss")
class CalledAgain(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), lambda: super(CalledAgain, self).forward(0.9 * x)


@unusual("gradients of samples by vmap")
class PerSample(Chain):
    """Punishes each sample's gradient of the last layer's weights."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        weights = dict(self.end.named_parameters())

        def squared(weights: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
            return functional_call(self.end, weights, (h,)).square().sum()

        slopes = vmap(grad(squared), (None, 0))(weights, x)
        return self.end(x), 1e-3 * sum(s.square().flatten(1).sum(-1) for s in slopes.values())


@unusual("an ensemble by vmap")
class Ensemble(Chain):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        names = list(dict(self.heads[0].named_parameters()))
        stacked = {name: torch.stack([head.get_parameter(name) for head in self.heads]) for name in names}
        predicted = vmap(lambda w: functional_call(self.heads[0], w, (x,)))(stacked)
        return predicted.mean(0) + self.end(x)


@unusual("an ensemble of stacked copies")
class Stacked(Chain):
    """Parameters that ``stack_module_state`` makes of the heads; a functional head without weights."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        stacked, _ = stack_module_state([nn.Linear(8, 5) for _ in range(3)])
        self.heads = nn.ParameterDict({name: nn.Parameter(p.detach()) for name, p in stacked.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return vmap(lambda w: functional_call(self.end, w, (x,)))(dict(self.heads.items())).mean(0)


@unusual("a derivative forward through the blocks")
class Directional(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        predicted, along = jvp(super().forward, (x,), (torch.ones_like(x),))
        return predicted, along.square().mean(-1)


@unusual("a derivative forward through the last layer")
class DirectionalEnd(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        predicted, along = jvp(lambda h: torch.tanh(self.end(h)), (x,), (torch.ones_like(x),))
        return predicted, along.square().mean(-1)


MODELS |= {
    "blocks checkpointed": lambda: Checkpointed(blocks(), "not reentrant"),
    "blocks checkpointed, reentrant": lambda: Checkpointed(blocks(), "reentrant"),
    "blocks checkpointed by twos": lambda: Checkpointed(blocks(), "sequential"),
    "checkpoints in blocks": lambda: Chain([CheckpointedInside(False) for _ in range(DEPTH)]),
    "checkpoints in blocks, reentrant": lambda: Chain([CheckpointedInside(True) for _ in range(DEPTH)]),
}


MODELS |= {
    f"a backward hook on {where}": lambda where=where: backward_hooks(where)
    for where in ("a block", "a layer", "the last layer")
}


@unusual("one block many times")
class Recurrent(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return self.end(x)


@unusual("a layer many times")
class Shares(Chain):
    """The last layer is called after every block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        said = 0
        for block in self.blocks:
            x = block(x)
            said = said + self.end(x)
        return said


Result = namedtuple("Result", "predicted hidden names")


class Predicted:
    """An object of the model's own."""

    def __init__(self, predicted: torch.Tensor) -> None:
        self.predicted = predicted


def object_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.predicted, targets)


@unusual("a named tuple")
class Named(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        return Result(super().forward(x), [x, None], {"x": "a name"})


@unusual("an object")
class Object(Chain):
    def forward(self, x: torch.Tensor) -> Any:
        return Predicted(super().forward(x))


@unusual("a tensor beside an object")
class Beside(Chain):
    """What an object holds besides is of no use to the loss, such as a cache."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return Result(self.end(x), Predicted(x), None)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.by * gradient, None


@unusual("gradients turned around")
class Domain(Chain):
    """A second head whose gradients are turned around (DANN)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.domain = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        domain = self.domain(Reversed.apply(x, 0.3))
        return self.end(x), domain.log_softmax(-1)[:, 0].neg()


@unusual("codes without a gradient of their own")
class Quantised(Chain):
    """The nearest of learned codes, straight through (VQ-VAE)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.codes = nn.Embedding(6, 8)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        code = self.codes(torch.cdist(x, self.codes.weight).argmin(-1))
        apart = (x.detach() - code).square().mean(-1) + 0.25 * (x - code.detach()).square().mean(-1)
        return self.end(x + (code - x).detach()), apart


@unusual("a frozen copy as a teacher")
class Taught(Chain):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.teacher = Chain([Block(8) for _ in range(DEPTH)]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            wanted = self.teacher(x).softmax(-1)
        said = super().forward(x)
        return said, -(wanted * said.log_softmax(-1)).sum(-1)


@unusual("parameters in lists and dictionaries")
class Listed(Chain):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.scales = nn.ParameterList(torch.ones(8) for _ in range(DEPTH))
        self.shifts = nn.ParameterDict({"first": torch.zeros(8), "last": torch.zeros(8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x) + self.shifts["first"]
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return self.end(x + self.shifts["last"])


@unusual("weights that a network makes")
class Hyper(Chain):
    """A linear layer whose weights are computed from a code (a hypernetwork)."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.code = nn.Parameter(torch.randn(3))
        self.maker = nn.Linear(3, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x @ self.maker(self.code).view(8, 8))


@unusual("weights normed within the model")
class Cosine(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return 4 * normalize(x, dim=-1) @ normalize(self.end.weight, dim=-1).t()


@unusual("a fixed point")
class FixedPoint(Chain):
    """Goes through the blocks without gradients until little changes, and once more with them (DEQ)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        h = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                h = self._once(h, x)
        return self.end(self._once(h, x))

    def _once(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = 0.5 * block(h)
        return torch.tanh(h + x)


LOSSES = {
    "gradient penalty in the loss": "gradient_loss",
    "activations kept elsewhere": "kept_loss",
    "called again by the loss": "called_again_loss",
    "a named tuple": "object_loss",
    "an object": "object_loss",
    "a tensor beside an object": "object_loss",
}


def loss_of(name: str) -> str:
    return f"unusual:{LOSSES.get(name, 'prediction_loss')}"
