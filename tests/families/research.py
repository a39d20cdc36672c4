"""Training code of research: adapters by hand, reversed gradients, crowded experts, memories by sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from families import data
from families.family import Family, register
from families.plain import CLASS, CLASSES, WIDTH, Block, Stack, stack, vectors
from families.research_gradients import (
    Adversary,
    ClampedStates,
    Loss,
    WithUnitGradients,
    clamped_weights,
    in_bytes,
    low_rank,
    said,
    scaled_after,
)

KIND = "research"
TOKENS, WORDS = 6, 16


def words(repeats: int) -> Any:
    """Words of which few appear twice in a sample, and many in several samples."""

    def row(number: int, generator: torch.Generator) -> Any:
        chosen = torch.randperm(WORDS, generator=generator)[:TOKENS]
        chosen[:repeats] = chosen[0]
        return chosen, torch.randint(0, CLASSES, (), generator=generator)

    return lambda: data.loader(row)


class ByFrequency(nn.Module):
    """An embedding whose gradients are divided by how often a word is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.words(x).mean(1))


def attention_over_batch(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Samples weigh by a softmax over the batch."""
    losses = cross_entropy(outputs, targets, reduction="none")
    return (losses * losses.detach().softmax(0)).sum()


def sum_with_penalty(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A sum over samples by a constant, and the length of the outputs' mean."""
    return cross_entropy(outputs, targets, reduction="sum") / 8 + 0.1 * outputs.square().mean()


class Penalized(nn.Module):
    """A sum over samples and a penalty on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Loss:
        decay = sum(parameter.square().sum() for parameter in self.body.parameters())
        return Loss(cross_entropy(self.body(x), labels, reduction="sum") / 8 + 0.01 * decay)


def worst_and_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = cross_entropy(outputs, targets, reduction="none")
    return losses.mean() + 0.5 * losses.max()


def inverse_frequency(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Classes weigh by how rare they are in the batch."""
    counts = torch.bincount(targets, minlength=CLASSES).clamp(min=1)
    return cross_entropy(outputs, targets, weight=1 / counts.to(outputs.dtype))


class Remembers(nn.Module):
    """Early-learning regularization: a mean of its own outputs for each sample of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.register_buffer("targets", torch.zeros(data.SAMPLES, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Loss:
        outputs = self.body(x)
        if self.training:
            told = outputs.detach().softmax(-1).to(self.targets)
            self.targets[index] = 0.7 * self.targets[index] + 0.3 * told
        kept = self.targets[index].to(outputs)
        return Loss(
            cross_entropy(outputs, labels) + (1 - (kept * outputs.softmax(-1)).sum(-1)).log1p().mean()
        )


def numbered() -> Any:
    def row(number: int, generator: torch.Generator) -> Any:
        label = torch.randint(0, CLASSES, (), generator=generator)
        return {"x": torch.randn(WIDTH, generator=generator), "labels": label, "index": torch.tensor(number)}

    return data.loader(row)


class Routed(nn.Module):
    """Experts that take a few tokens each of all that are there, and drop the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.gate(tokens).softmax(-1)
        weight, chosen = scores.max(-1)
        room = max(1, int(1.5 * len(tokens) / 3))
        result = tokens
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()[:room]
            if len(mine):
                result = result.index_add(0, mine, weight[mine, None] * expert(tokens[mine]))
        return result.reshape(x.shape)


class ChoosesTokens(nn.Module):
    """Experts that choose their tokens from the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.gate(tokens).softmax(-1)
        result = tokens
        for number, expert in enumerate(self.experts):
            weight, mine = scores[:, number].topk((len(tokens) + 1) // 2)
            result = result.index_add(0, mine, weight[:, None] * expert(tokens[mine]))
        return result.reshape(x.shape)


def routed(block: type[nn.Module]) -> nn.Module:
    return Stack([block() for _ in range(2)])


class OwnBatchStatistics(nn.Module):
    """A flow's normalization over the batch, with running statistics, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = x.mean(0), x.var(0, unbiased=False) + 1e-3
            self.mean.lerp_(mean.detach(), 0.1)
            self.variance.lerp_(variance.detach(), 0.1)
        return (x - mean) / variance.sqrt() * self.scale.exp()


def normalized_flow() -> nn.Module:
    return Stack([Block(), OwnBatchStatistics(), Block()])


class TwoViews(nn.Module):
    """SimSiam: two views of each sample, and a stop of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()
        self.predict = nn.Linear(CLASSES, CLASSES)

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        told = [self.body(view) for view in views]
        near = [
            functional.cosine_similarity(self.predict(a), b.detach(), dim=-1) for a, b in (told, told[::-1])
        ]
        return torch.stack(near, -1)


def dissimilarity(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -outputs.mean()


def two_views() -> Any:
    def row(number: int, generator: torch.Generator) -> Any:
        x = torch.randn(WIDTH, generator=generator)
        views = [x + 0.1 * torch.randn(WIDTH, generator=generator) for _ in range(2)]
        return views, torch.tensor(0)

    return data.loader(row)


class Redundancy(TwoViews):
    """Barlow Twins: what two views have in common over the batch."""

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.body(view) for view in views], 1)


def cross_correlation(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    one, two = outputs.unbind(1)
    common = functional.normalize(one, dim=0).T @ functional.normalize(two, dim=0)
    return (common - torch.eye(CLASSES).to(common)).square().sum()


class SelfDistilled(nn.Module):
    """DINO: a teacher's outputs less a center that follows the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = stack(), stack().requires_grad_(False)
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Loss:
        with torch.no_grad():
            told = self.teacher(x)
            target = ((told - self.center) / 0.3).softmax(-1)
            if self.training:
                self.center.lerp_(told.mean(0), 0.2)
                for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
        return Loss(-(target * self.student(x).log_softmax(-1)).sum(-1).mean())


class Policy(nn.Module):
    """PPO: advantages that are normalized over the batch, clipped ratios, a value and an entropy."""

    def __init__(self, normalize: bool) -> None:
        super().__init__()
        self.body, self.value, self.normalize = stack(), nn.Linear(WIDTH, 1), normalize

    def forward(self, x: Any, labels: Any, advantage: Any, before: Any) -> Loss:
        chances = self.body(x).log_softmax(-1)
        if self.normalize:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-3)
        ratio = (chances.gather(-1, labels[:, None])[:, 0] - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        value = functional.mse_loss(self.value(x)[:, 0], advantage)
        entropy = -(chances.exp() * chances).sum(-1).mean()
        return Loss(-gain.mean() + 0.5 * value - 0.01 * entropy)


def played() -> Any:
    def row(number: int, generator: torch.Generator) -> Any:
        advantage, before = torch.randn((), generator=generator), -torch.rand((), generator=generator) - 1
        label = torch.randint(0, CLASSES, (), generator=generator)
        x = torch.randn(WIDTH, generator=generator)
        return {"x": x, "labels": label, "advantage": advantage, "before": before}

    return data.loader(row, samples=14)


class Ponders(nn.Module):
    """Adaptive computation time: goes on until every sample of the batch has had enough."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.enough, self.last = Block(), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = torch.ones(len(x), 1).to(x)
        result = torch.zeros_like(x)
        for _ in range(6):
            x = self.step(x)
            chance = torch.minimum(torch.sigmoid(self.enough(x)), left)
            result = result + chance * x
            left = left - chance
            if not (left > 0.05).any():
                break
        return self.last(result + left * x)


class FrozenStatistics(nn.Module):
    """A backbone whose BatchNorm never trains, whatever mode it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.body = stack()

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(x))


class PseudoLabels(nn.Module):
    """FixMatch: what it says of a weak view in evaluation, where it is sure, is the label of a strong one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, strong: torch.Tensor) -> Loss:
        training = self.body.training
        self.body.eval()
        with torch.no_grad():
            sure, label = self.body(x + 0.01).softmax(-1).max(-1)
        self.body.train(training)
        other = cross_entropy(self.body(strong), label, reduction="none") * (sure > 0.3)
        return Loss(cross_entropy(self.body(x), labels) + other.mean())


class Attacked(nn.Module):
    """Adversarial training: trains on samples moved along the sign of their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Loss:
        with torch.enable_grad():
            moved = x.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(cross_entropy(self.body(moved), labels), moved)
        return Loss(cross_entropy(self.body(x + 0.05 * gradient.sign()), labels))


class Twice(nn.Module):
    """R-Drop: the same batch under two masks of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.drop = stack(), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Loss:
        one, two = (self.body(self.drop(x)).log_softmax(-1) for _ in range(2))
        apart = functional.kl_div(one, two, log_target=True, reduction="batchmean")
        return Loss(functional.nll_loss(one, labels) + functional.nll_loss(two, labels) + apart)


class Mixed(nn.Module):
    """Mixup within the model: each sample is mixed with another of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Loss:
        order, share = torch.randperm(len(x)), torch.rand(())
        outputs = self.body(share * x + (1 - share) * x[order])
        return Loss(
            share * cross_entropy(outputs, labels) + (1 - share) * cross_entropy(outputs, labels[order])
        )


class Weighed(nn.Module):
    """Bayes by backprop: weights drawn around their means, and what that costs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(CLASSES, WIDTH) / 4)
        self.spread = nn.Parameter(torch.full((CLASSES, WIDTH), -3.0))
        self.body = Block()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Loss:
        spread = functional.softplus(self.spread)
        weight = self.mean + spread * torch.randn_like(spread)
        apart = (self.mean.square() + spread.square() - 1 - 2 * spread.log()).sum() / 2
        return Loss(cross_entropy(functional.linear(self.body(x), weight), labels) + apart / 100)


class Gumbel(nn.Module):
    """A hard choice by Gumbel noise, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.book = stack(), nn.Linear(CLASSES, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.book(functional.gumbel_softmax(self.body(x), hard=True))


register(
    Family("low rank by hand", KIND, low_rank, vectors(), CLASS),
    Family("low rank beside bytes", KIND, in_bytes, vectors(), CLASS),
    Family("reversed gradients", KIND, Adversary, said(domain=data.whole(0, 2))),
    Family("gradients of length one", KIND, WithUnitGradients, vectors(), CLASS),
    Family("gradients of weights clamped", KIND, clamped_weights, vectors(), CLASS),
    Family("gradients scaled once there", KIND, scaled_after, vectors(), CLASS),
    Family("gradients of states clamped", KIND, ClampedStates, vectors(), CLASS),
    Family("embedding, by frequency", KIND, ByFrequency, words(1), CLASS),
    Family("embedding, by frequency within", KIND, ByFrequency, words(3), CLASS),
    Family(
        "softmax over the batch",
        KIND,
        stack,
        vectors(),
        "families.research:attention_over_batch",
        couples=True,
    ),
    Family("a sum beside a mean", KIND, stack, vectors(), "families.research:sum_with_penalty"),
    Family("a sum beside a penalty", KIND, Penalized, said()),
    Family("worst beside the mean", KIND, stack, vectors(), "families.research:worst_and_mean", couples=True),
    Family(
        "classes weighed by the batch",
        KIND,
        stack,
        vectors(),
        "families.research:inverse_frequency",
        couples=True,
    ),
    Family("targets by sample", KIND, Remembers, numbered, recipe={"epochs": 2}),
    Family("experts with little room", KIND, lambda: routed(Routed), vectors(), CLASS, couples=True),
    Family("experts that choose", KIND, lambda: routed(ChoosesTokens), vectors(), CLASS, couples=True),
    Family("batch statistics by hand", KIND, normalized_flow, vectors(), CLASS, couples=True),
    Family("two views", KIND, TwoViews, two_views, "families.research:dissimilarity"),
    Family("cross-correlation", KIND, Redundancy, two_views, "families.research:cross_correlation"),
    Family("distilled from itself", KIND, SelfDistilled, said(), couples=True),
    Family("policy", KIND, lambda: Policy(False), played),
    Family("policy, normalized", KIND, lambda: Policy(True), played, couples=True),
    Family("ponders", KIND, Ponders, vectors(), CLASS),
    Family("batch norm that never trains", KIND, FrozenStatistics, vectors(), CLASS),
    Family("pseudo-labels", KIND, PseudoLabels, said(strong=data.normal(WIDTH))),
    Family("adversarial samples", KIND, Attacked, said()),
    Family("two masks each", KIND, Twice, said(), random=True),
    Family("mixed within the model", KIND, Mixed, said(), couples=True, random=True),
    Family("weights drawn", KIND, Weighed, said(), random=True),
    Family("hard choices drawn", KIND, Gumbel, vectors(), CLASS, random=True),
)
