"""What makes up a loss: parts of a batch give the whole's loss and gradients, or are refused, never wrong."""

# Models without types.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.training.batches import split
from saturn_airflow.training.layout import of_batch
from saturn_airflow.training.losses import decompose, means, rules
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.losses.rules import LossMeans, Rule
from saturn_airflow.training.ranks import Ranks

CPU = torch.device("cpu")
CLASSES, LENGTH = 4, 3
WEIGHTS = torch.tensor([0.3, 1.0, 2.0, 0.7], dtype=torch.float64)

Batch = dict[str, torch.Tensor]


class Heads(nn.Module):
    """Logits of some positions, and one vector, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.logits = nn.Linear(5, LENGTH * CLASSES).double()
        self.vector = nn.Linear(5, 4).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor, first: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "logits": self.logits(x).view(len(x), LENGTH, CLASSES),
            "vector": self.vector(x).tanh(),
            "weights": self.vector.weight,
        }


def _by_hand(o: Any, b: Batch) -> torch.Tensor:
    losses = cross_entropy(o["logits"].flatten(0, 1), b["labels"].flatten(), reduction="none")
    counted = (b["labels"].flatten() != -100).double()
    return (losses * counted).sum() / counted.sum()


TERMS: dict[str, Callable[[Any, Batch], torch.Tensor]] = {
    "labels": lambda o, b: cross_entropy(o["logits"].flatten(0, 1), b["labels"].flatten()),
    "weighted": lambda o, b: nn.NLLLoss(WEIGHTS)(
        o["logits"].log_softmax(2).flatten(0, 1), b["labels"].flatten()
    ),
    "first label": lambda o, b: cross_entropy(o["logits"][:, 0], b["first"], ignore_index=0),
    "chosen": lambda o, b: functional.l1_loss(o["vector"][b["y"][:, 0] > 0], b["y"][b["y"][:, 0] > 0]),
    "squares": lambda o, b: functional.mse_loss(o["vector"], b["y"]),
    "squares by hand": lambda o, b: (o["vector"] - b["y"]).square().mean(),
    "size by hand": lambda o, b: o["vector"].abs().mean(),
    "sum": lambda o, b: cross_entropy(o["logits"].flatten(0, 1), b["labels"].flatten(), reduction="sum"),
    "labels by hand": _by_hand,
    "penalty": lambda o, b: o["weights"].square().sum(),
    "in-batch negatives": lambda o, b: cross_entropy(
        o["vector"] @ o["vector"].T * 3, torch.arange(len(o["vector"]))
    ),
    "spread": lambda o, b: o["vector"].mean(0).square().sum(),
    "not linear": lambda o, b: cross_entropy(o["logits"].flatten(0, 1), b["labels"].flatten()).exp(),
    "flooded": lambda o, b: (cross_entropy(o["logits"].flatten(0, 1), b["labels"].flatten()) - 0.05).abs(),
    "clamped": lambda o, b: cross_entropy(o["logits"].flatten(0, 1), b["labels"].flatten()).clamp(max=30),
}
#: What no cut can be right for, whatever stands beside it.
COUPLED = {"in-batch negatives", "spread", "not linear", "flooded", "clamped"}


def loss_of(terms: Sequence[tuple[str, float]]) -> Callable[[Any, Batch], torch.Tensor]:
    return lambda outputs, batch: sum(
        (TERMS[name](outputs, batch) * by for name, by in terms), torch.tensor(0.0)
    )


def batch_of(samples: int, seed: int) -> Batch:
    """Samples with other numbers of labels each, none of which is without all of them."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (samples, LENGTH), generator=g)
    labels[::2, 1:] = -100
    labels[torch.rand(samples, generator=g) < 0.3, 1] = -100
    first = torch.randint(0, 3, (samples,), generator=g)
    first[0], first[-1] = 1, 0
    y = torch.randn(samples, 4, generator=g, dtype=torch.float64)
    y[0, 0] = 1.0
    x = torch.randn(samples, 5, generator=g, dtype=torch.float64)
    return {"x": x, "y": y, "first": first, "labels": labels}


class Whole:
    """Data of one batch."""

    def __init__(self, batch: Batch) -> None:
        self.layout = of_batch(batch, None)


def plain_loop(model: nn.Module, loss: Callable[[Any, Batch], Any], batch: Batch) -> tuple[float, list[Any]]:
    """What nobody has cut: the loss and the gradients."""
    model.zero_grad()
    value = loss(model(batch["x"], batch["y"], batch["first"]), batch)
    value.backward()
    return float(value.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def objective_of(loss: Callable[[Any, Batch], Any], model: nn.Module, batch: Batch) -> Objective:
    job = Job("j", "x:y", "x:z", hparams=HParams(precision="float64"))
    objective: Any = Objective(job, model, CPU)
    objective._loss_function = loss
    return objective.of(Whole(batch))


def find(objective: Objective, model: nn.Module, batch: Batch, one_by_one: bool) -> Rule:
    cuts = decompose.Cuts("it", one_by_one, parts=1)
    parallel = Parallel(model, Ranks(rank=0, size=1, device=CPU))
    whole = objective.take(batch, len(batch["x"]), range(len(batch["x"])))
    return decompose.find_rule(parallel, objective, whole, cuts)


def cut(
    objective: Objective, rule: Rule, model: nn.Module, batch: Batch, accumulate: int, shares: int
) -> tuple[float, list[Any]]:
    """Loss and gradients as the loop has them, of all ranks one after the other.

    :raises DoesNotFit: when the rule does not hold for this batch.
    """
    samples = len(batch["x"])
    objective = objective.of(Whole(batch), rule)  # type: ignore[arg-type]
    objective.begin(samples)
    everyones = None
    if rule.kind == "sum" and rule.means is None:
        loss_means = objective.loss_means = LossMeans(Rule("samples", 0))
        objective(model, batch, samples)
        everyones, objective.loss_means = loss_means.counts, None
        objective.begin(samples)
    model.zero_grad()
    news = torch.zeros(2, dtype=torch.float64)
    for micro_batch in split(range(samples), min(accumulate, samples)):
        for rows in split(micro_batch, shares):
            if everyones is not None:
                objective.loss_means = LossMeans(rule, len(rows), samples, CPU, everyones)
            part = objective.take(batch, samples, rows)
            total, over = objective(model, part.data, part.samples)
            (total / samples).backward()
            news += torch.stack([total.detach(), over])
    tally = objective.end().tolist()
    rules.check(tally if everyones is None else [], "now")
    gradients = [p.grad * (samples / news[1]) for p in model.parameters() if p.grad is not None]
    return float(news[0] / news[1]), gradients


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    names=st.lists(st.sampled_from(list(TERMS)), min_size=1, max_size=3, unique=True),
    factors=st.lists(st.sampled_from([1.0, 0.5, 3.0]), min_size=3, max_size=3),
    samples=st.integers(3, 7),
    accumulate=st.integers(1, 3),
    shares=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_any_loss_and_any_cut_is_exact_or_refused(
    names: list[str], factors: list[float], samples: int, accumulate: int, shares: int, seed: int
) -> None:
    model, loss = Heads(), loss_of(list(zip(names, factors, strict=False)))
    seen, later = batch_of(samples, seed), batch_of(samples, seed + 1000)
    objective = objective_of(loss, model, seen)
    try:
        rule = find(objective, model, seen, accumulate > 1)
        got = cut(objective, rule, model, later, accumulate, shares)
    except DoesNotFit:
        return
    expected = plain_loop(model, loss, later)
    assert got[0] == pytest.approx(expected[0], rel=1e-9)
    for one, other in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    if accumulate * shares > 1:
        assert not COUPLED & set(names)


@pytest.mark.parametrize(
    ("terms", "one_by_one", "kind"),
    [
        (["labels"], True, "labels"),
        (["weighted"], True, "labels"),
        (["chosen", "penalty"], True, "labels"),
        (["squares"], True, "labels"),
        (["squares by hand"], True, "samples"),
        (["squares", "size by hand", "penalty"], True, "samples"),
        (["sum"], True, "sum"),
        (["labels", "first label"], False, "sum"),
        (["labels", "squares", "sum"], False, "sum"),
    ],
)
def test_what_can_be_right_is_not_refused(terms: list[str], one_by_one: bool, kind: str) -> None:
    model, batch = Heads(), batch_of(6, 5)
    objective = objective_of(loss_of([(name, 2.0) for name in terms]), model, batch)
    assert find(objective, model, batch, one_by_one).kind == kind


@pytest.mark.parametrize(
    ("terms", "one_by_one", "says"),
    [
        (["in-batch negatives"], False, r"losses \(.*\) do not make up the whole's .*couples_batch=True"),
        (["labels", "spread"], True, "couples_batch=True"),
        (["not linear"], False, "couples_batch=True"),
        (["labels by hand"], False, r"a pair \(sum, count\)"),
        (["labels", "first label"], True, "2 means over different things.*accumulate=1"),
    ],
)
def test_what_can_not_be_right_is_refused_with_the_reason(
    terms: list[str], one_by_one: bool, says: str
) -> None:
    model, batch = Heads(), batch_of(6, 5)
    objective = objective_of(loss_of([(name, 1.0) for name in terms]), model, batch)
    with pytest.raises(DoesNotFit, match=f"it cuts batches into parts, and .*{says}"):
        find(objective, model, batch, one_by_one)


def test_pairs_must_add_up() -> None:
    def negatives(o: Any, b: Batch) -> Any:
        return TERMS["in-batch negatives"](o, b) * len(b["y"]), len(b["y"])

    def tokens(o: Any, b: Batch) -> Any:
        return TERMS["sum"](o, b), (b["labels"] != -100).sum()

    model, batch = Heads(), batch_of(6, 5)
    find(objective_of(tokens, model, batch), model, batch, True)
    with pytest.raises(DoesNotFit, match=r"pairs \(sum, count\) .* do not add up.*couples_batch=True"):
        find(objective_of(negatives, model, batch), model, batch, True)


def test_a_loss_that_draws_numbers_is_taken_at_its_word() -> None:
    def noisy(o: Any, b: Batch) -> torch.Tensor:
        return functional.mse_loss(o["vector"] + torch.randn_like(o["vector"]), b["y"])

    model, batch = Heads(), batch_of(6, 5)
    assert find(objective_of(noisy, model, batch), model, batch, True).kind == "labels"


def test_uneven_means_are_noticed_at_the_step_where_they_come() -> None:
    names = [("first label", 1.0), ("labels", 1.0)]
    model, even = Heads(), batch_of(6, 5)
    even["labels"][:], even["first"][:] = 1, 1
    objective = objective_of(loss_of(names), model, even)
    rule = find(objective, model, even, True)
    assert rule == Rule("samples", 2)
    cut(objective, rule, model, even, 2, 1)
    with pytest.raises(DoesNotFit, match="now the means in the loss are over more things for some samples"):
        cut(objective, rule, model, batch_of(6, 5), 2, 1)


@pytest.mark.parametrize(("accumulate", "shares"), [(2, 1), (1, 2)])
def test_uneven_means_would_come_to_something_else(
    accumulate: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, model, batch = loss_of([("first label", 1.0), ("labels", 1.0)]), Heads(), batch_of(6, 5)
    monkeypatch.setattr(rules, "check", lambda tally, when: None)
    got = cut(objective_of(loss, model, batch), Rule("samples", 2), model, batch, accumulate, shares)
    expected = plain_loop(model, loss, batch)
    assert abs(got[0] - expected[0]) > 1e-3
    off = [float((one - other).abs().max()) for one, other in zip(got[1], expected[1], strict=True)]
    assert max(off) > 1e-3


@pytest.mark.parametrize("shares", [1, 2])
def test_parts_without_labels_and_infinite_outputs_are_zeros(shares: int) -> None:
    class Minus(Heads):
        def forward(self, x: torch.Tensor, y: torch.Tensor, first: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = super().forward(x, y, first)
            closed = torch.zeros(CLASSES, dtype=torch.bool)
            closed[3] = True
            return outputs | {"logits": outputs["logits"].masked_fill(closed, -torch.inf)}

    model, batch = Minus(), batch_of(3, 5)
    batch["labels"].clamp_(max=2)
    batch["labels"][1] = -100
    loss = loss_of([("labels", 1.0)])
    objective = objective_of(loss, model, batch)
    got = cut(objective, rules.LABELS, model, batch, 2, shares)
    expected = plain_loop(model, loss, batch)
    assert got[0] == pytest.approx(expected[0], rel=1e-12)
    for one, other in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_stand_in_has_gradients_that_are_exactly_zero() -> None:
    model, batch = Heads(), batch_of(3, 5)
    objective = objective_of(lambda o, b: o["logits"].sum() * torch.inf, model, batch)
    total, over = objective(model, batch, 0)
    total.backward()
    assert (total.item(), over.item()) == (0.0, 0.0)
    assert all(p.grad is not None and not p.grad.any() for p in model.logits.parameters())
    assert all(p.grad is None for p in model.vector.parameters())


class Collects:
    def __init__(self) -> None:
        self.counts: list[float] = []

    def mean(self, total: torch.Tensor, count: means.Count) -> torch.Tensor:
        self.counts.append(float(count))
        return total / count


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
P = torch.softmax(X.flip(0), 1)
LABELS = torch.tensor([0, 1, -100, 3, 2])
SIGNS = X.sign()
LOG_P = X.flip(1).unsqueeze(1).expand(5, 2, 4).log_softmax(2)

MEANS: dict[str, tuple[Callable[[], torch.Tensor], float]] = {
    "cross_entropy": (lambda: cross_entropy(X, LABELS), 4),
    "class weights": (
        lambda: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)(X, LABELS),
        float(WEIGHTS.sum()),
    ),
    "probabilities": (lambda: functional.cross_entropy(X, P, weight=WEIGHTS), 5),
    "one sample": (lambda: functional.cross_entropy(X[0], LABELS[1]), 1),
    "nll of images": (lambda: functional.nll_loss(X.view(1, 4, 5).log_softmax(1), LABELS[None]), 4),
    "mse": (lambda: functional.mse_loss(X, P), 20),
    "l1": (lambda: functional.l1_loss(X, P), 20),
    "mse, weighed": (lambda: functional.mse_loss(X, P, weight=P), 5),  # type: ignore[call-arg]
    "l1, weighed": (lambda: functional.l1_loss(X, P, weight=2 * P), 10),  # type: ignore[call-arg]
    "smooth l1": (lambda: functional.smooth_l1_loss(X, P), 20),
    "huber": (lambda: functional.huber_loss(X, P), 20),
    "bce": (lambda: functional.binary_cross_entropy(P, P.flip(0)), 20),
    "bce of logits": (lambda: nn.BCEWithLogitsLoss(WEIGHTS, pos_weight=WEIGHTS)(X, P), 20),
    "kl": (lambda: functional.kl_div(X, P), 20),
    "soft margin": (lambda: functional.soft_margin_loss(X, SIGNS), 20),
    "multi margin": (lambda: functional.multi_margin_loss(X, LABELS.clamp(0)), 5),
    "poisson": (lambda: functional.poisson_nll_loss(X, P), 20),
    "hinge": (lambda: functional.hinge_embedding_loss(X, SIGNS), 20),
    "ranking": (lambda: functional.margin_ranking_loss(X, P, SIGNS), 20),
    "cosine": (lambda: functional.cosine_embedding_loss(X, P, torch.ones(5)), 5),
    "triplet": (lambda: functional.triplet_margin_loss(X, P, P.flip(0)), 5),
    "ctc": (lambda: functional.ctc_loss(LOG_P, torch.tensor([[1, 2], [3, 0]]), (5, 4), (2, 1)), 2),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MEANS)
def test_means_are_heard_and_counted_as_torch_takes_them(name: str) -> None:
    compute, count = MEANS[name]
    means.set_listener(None)
    alone = compute()
    listener = Collects()
    means.set_listener(listener)
    try:
        assert float(compute()) == pytest.approx(float(alone), rel=1e-12)
    finally:
        means.set_listener(None)
    assert listener.counts == [pytest.approx(count)]


def test_what_fails_on_a_part_of_a_batch_is_not_cut() -> None:
    def neighbours(o: Any, b: Batch) -> torch.Tensor:
        return o["vector"][b["next"]].square().mean()

    model, batch = Heads(), batch_of(12, 5)
    batch["next"] = torch.arange(12).roll(6)  # numbers of samples in the whole batch
    objective = objective_of(neighbours, model, batch)
    objective.run = lambda module, b: module(b["x"], b["y"], b["first"])  # type: ignore[assignment, method-assign]
    whole = objective.take(batch, 12, range(12))
    parallel = Parallel(model, Ranks(rank=0, size=1, device=CPU))
    with pytest.raises(DoesNotFit, match=r"the job fails on them .*couples_batch"):
        decompose.find_rule(parallel, objective, whole, decompose.Cuts("it", False, parts=3))


def test_looking_at_parts_leaves_the_model_as_it_was() -> None:
    class Counting(Heads):
        calls = 0

        def forward(self, *args: torch.Tensor) -> Any:
            self.calls += 1
            return super().forward(*args)

    model, batch = Counting(), batch_of(6, 5)
    find(objective_of(loss_of([("labels", 1.0)]), model, batch), model, batch, False)
    assert model.calls == 0


def test_a_count_on_the_host_is_not_copied_to_a_device() -> None:
    """A copy from the host would wait for all that the device has to do."""
    asked: list[Any] = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    device = torch.device("meta")
    with Asked():
        found = [rules.as_scalar(value, device) for value in (3, torch.tensor(3), torch.tensor([2.5]))]
    assert all(one.device == device and one.dtype == torch.float64 and not one.ndim for one in found)
    assert not {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default} & {*asked}
    assert float(rules.as_scalar(torch.tensor([2.5]), CPU)) == 2.5
