"""Odd models and optimizers train as a plain loop does, under every technique that takes them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import plain_training
import pytest
import torch
from cells import Outcome, Strategy, job, one_of_each, run
from cells import request as train_request
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model import references
from saturn_airflow.model.jobs import HParams
from saturn_airflow.training.loop import train
from saturn_airflow.training.optim.elementwise import refuse_coupled
from saturn_airflow.training.optim.mixing import refuse_mixing
from saturn_airflow.training.ranks import Ranks, launch

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(2400)]

LOSSES, WEIGHTS = 1e-12, 1e-11
STEPS, STOPPED_AT = 5, 2


class Case(NamedTuple):
    """A model with an optimizer, and how it is to be trained: at one go, or resumed under the second."""

    model: str
    strategies: tuple[tuple[Strategy, ...], ...]
    data: str = "odd:vectors"
    optimizer: str = "torch.optim:AdamW"
    optimizer_args: Mapping[str, Any] = MappingProxyType({})
    lr: float = 1e-2
    clip: float | None = None
    accumulate: int = 1
    model_args: Mapping[str, Any] = MappingProxyType({})
    loss: str = "odd:class_loss"
    #: How far weights may be off: transformers computes norms and routing in float32.
    within: float = WEIGHTS


SINGLE, SPILL = Strategy("single"), Strategy("spill")
DDP, FSDP = (Strategy(technique, 2) for technique in ("ddp", "fsdp"))
DDP3, FSDP3 = (Strategy(technique, 3) for technique in ("ddp", "fsdp"))
AT_ONCE = Strategy("fsdp", 2, {"by_block": False})
PIPELINE, TENSOR = (Strategy(technique, 2) for technique in ("pipeline", "tensor"))

CASES: dict[str, Case] = {
    "calls that are counted": Case(
        "odd:called",
        (
            *((SINGLE,), (DDP,), (FSDP,), (TENSOR,), (SPILL,)),
            *((SINGLE, SINGLE), (SINGLE, FSDP), (FSDP, DDP), (DDP, SPILL), (SPILL, TENSOR)),
        ),
    ),
    "state in groups": Case(
        "odd:chain",
        ((SINGLE, SINGLE), (SINGLE, FSDP), (FSDP, DDP), (DDP, SPILL), (SPILL, SINGLE)),
        optimizer="odd:Counting",
    ),
    "state under names": Case(
        "odd:chain",
        ((SINGLE, SINGLE), (SINGLE, FSDP), (FSDP, DDP), (DDP, SPILL), (SPILL, SINGLE)),
        optimizer="odd:CountsUnderNames",
    ),
    "a counter of the class": Case("odd:chain", ((PIPELINE,), (FSDP,)), optimizer="coupling:CountsOnClass"),
    "uncommon buffers": Case("odd:storing", ((SINGLE, SINGLE),)),
    "channels last": Case(
        "odd:channels_last", ((SINGLE, SINGLE), (SINGLE, DDP), (DDP, FSDP), (FSDP, SINGLE)), "odd:images"
    ),
    "equal experts": Case(
        "odd:equal_experts", ((DDP,), (FSDP,), (FSDP3,), (DDP3, FSDP), (FSDP, SINGLE)), accumulate=1
    ),
    "unequal experts": Case("odd:unequal_experts", ((DDP,), (FSDP,), (FSDP3,), (SINGLE, FSDP)), clip=0.1),
    "only experts": Case("odd:only_experts", ((DDP,), (AT_ONCE,))),
    "passing over blocks": Case("odd:skipping", ((DDP3,), (FSDP,), (FSDP3,), (AT_ONCE,))),
    "scalars, unused, frozen": Case(
        "odd:odd", ((DDP,), (FSDP,), (FSDP3,), (AT_ONCE,), (FSDP, DDP), (DDP3, FSDP)), clip=0.1
    ),
    "objects in objects": Case("odd:holding", ((FSDP,),)),
    "blocks twice": Case("odd:again", ((DDP,), (FSDP,), (FSDP3,), (AT_ONCE,))),
    "blocks twice, some skipped": Case("block_orders:skipping_again", ((FSDP,), (FSDP3,))),
    "three views": Case("block_orders:viewed", ((FSDP,), (FSDP3,)), accumulate=2),
    "a norm of heads": Case("odd:headed", ((TENSOR,), (TENSOR, DDP), (FSDP, TENSOR)), clip=0.1, accumulate=2),
}
SPARSE = (SINGLE, DDP, SPILL, PIPELINE)
CASES |= {
    "sparse gradients, SGD": Case(
        "odd:worded",
        ((SINGLE,), (DDP,), (SPILL,), (PIPELINE,), (SINGLE, SPILL), (DDP, PIPELINE)),
        "odd:words",
        "torch.optim:SGD",
        {"momentum": 0.9},
        lr=0.1,
        clip=0.1,
        accumulate=2,
    ),
    "sparse gradients, Adagrad": Case(
        "odd:worded", tuple((one,) for one in SPARSE), "odd:words", "torch.optim:Adagrad", clip=0.1
    ),
    "sparse gradients, SparseAdam": Case(
        "odd:worded",
        tuple((one,) for one in SPARSE),
        "odd:words",
        "torch.optim:SparseAdam",
        model_args={"only": True},
        accumulate=2,
    ),
    "shared sparse embeddings": Case(
        "odd:worded", ((DDP,),), "odd:words", "torch.optim:SGD", model_args={"shared": True}
    ),
}
FAMILIES = {
    "Phi": {"qk_layernorm": True},
    "Qwen3": {"head_dim": 4},
    "Gemma3": {"head_dim": 4},
    "Phi3": {},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "head_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [0],
    },
}
CASES |= {
    name: Case(
        "odd:family",
        ((TENSOR,), (TENSOR, SINGLE)),
        "odd:sentences",
        model_args={"name": name, **changes},  # type: ignore[dict-item]
        loss="odd:next_word_loss",
        within=1e-5,
    )
    for name, changes in FAMILIES.items()
}
CELLS = [(name, strategies) for name, case in CASES.items() for strategies in case.strategies]


def way(strategies: tuple[Strategy, ...]) -> str:
    return " to ".join(map(str, strategies))


def hparams(case: Case) -> HParams:
    return HParams(
        batches=STEPS,
        precision="float64",
        lr=case.lr,
        optimizer=case.optimizer,
        optimizer_args=dict(case.optimizer_args),
        clip_grad_norm=case.clip,
        accumulate=case.accumulate,
    )


def a_job(case: Case) -> Any:
    return job(
        load_model=case.model,
        load_dataloader=case.data,
        loss_function=case.loss,
        model_args=dict(case.model_args),
        hparams=hparams(case),
    )


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str], Outcome]:
    """What the chosen cells did; where one is resumed, what it did after that."""
    items = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [cell for cell in CELLS if {"name": cell[0], "strategies": cell[1]} in items]
    with tempfile.TemporaryDirectory() as root:
        first, last = [], []
        for number, (name, strategies) in enumerate(chosen):
            folder = Path(root, str(number))
            if len(strategies) > 1:
                before = train_request(a_job(CASES[name]), strategies[0], folder, batch_count=STOPPED_AT)
                first.append((before, strategies[0].devices))
            last.append((train_request(a_job(CASES[name]), strategies[-1], folder), strategies[-1].devices))
        run(first)
        keys = [(name, way(strategies)) for name, strategies in chosen]
        return dict(zip(keys, run(last), strict=True))


def plain(case: Case) -> tuple[plain_training.Losses, dict[str, torch.Tensor]]:
    def load(name: str) -> Callable[..., Any]:
        return references.load(name)  # type: ignore[no-any-return]

    model: nn.Module = load(case.model)(**case.model_args)
    return plain_training.train_plainly(
        model,
        load(case.data)(),
        load(case.loss),
        load(case.optimizer),
        STEPS,
        case.lr,
        case.clip,
        **case.optimizer_args,
    )


@pytest.mark.parametrize(
    ("name", "strategies"),
    one_of_each(CELLS),
    ids=lambda v: v if isinstance(v, str) else " to ".join(map(str, v)),
)
def test_trains_as_a_plain_loop_does(
    name: str,
    strategies: tuple[Strategy, ...],
    outcomes: dict[tuple[str, str], Outcome],
    record_deviation: Callable[[str, float, float], None],
) -> None:
    outcome = outcomes[name, way(strategies)]
    assert not outcome.refused, outcome.refused
    losses, weights = plain(CASES[name])
    started = STOPPED_AT if len(strategies) > 1 else 0
    assert list(outcome.losses) == list(range(started + 1, STEPS + 1))
    off = max(abs(losses[step] - loss) for step, loss in outcome.losses.items())
    weights_off = max(
        float((value - weights[key].to_dense()).abs().max())
        for key, value in outcome.weights.items()
        if value.dtype != torch.bool
    )
    record_deviation("odd jobs", off, weights_off)
    assert off <= max(LOSSES, CASES[name].within / 10)
    assert weights_off <= CASES[name].within


class Clipping(torch.optim.SGD):
    """Clips each parameter's gradient by its own norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                nn.utils.clip_grad_norm_(parameter, 1.0)
        super().step()


class ClippingParts(torch.optim.SGD):
    """Clips what this device has of each parameter's gradient by the norm of that."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                here = grad.to_local() if isinstance(grad, DTensor) else grad
                here.mul_(torch.clamp(1.0 / (here.norm() + 1e-6), max=1.0))
        super().step()


class OffByLittle(torch.optim.SGD):
    """Its rate depends a little on how even the gradients are that this device has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                here = grad.to_local() if isinstance(grad, DTensor) else grad
                here.mul_(1 + 0.02 * here.abs().mean() / here.abs().max())
        super().step()


class ClipsLater(torch.optim.SGD):
    """Clips each gradient, and all by the norm of all, once a warm-up is over."""

    warmup = 100

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
            if group["number"] > self.warmup:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
        super().step()


class ClipsLaterHere(ClipsLater):
    """The same by what this device has of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
            for parameter in group["params"] if group["number"] > self.warmup else ():
                grad = parameter.grad
                here = grad.to_local() if isinstance(grad, DTensor) else grad
                here.div_(here.norm())
        torch.optim.SGD.step(self)


def split_matrices(optimizers: list[str], ranks: Ranks) -> list[str]:
    """Why optimizers can't have matrices that are spread over these ranks by rows or columns; or nothing."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    reasons = []
    for optimizer in optimizers:
        cls = references.load(optimizer)
        for dim in (0, 1):
            cut = distribute_tensor(torch.ones(6, 8), mesh, [Shard(dim)], src_data_rank=None)
            try:
                refuse_coupled("it", lambda groups, cls=cls: cls(groups, lr=0.1), [{"params": [cut]}])  # type: ignore[misc]
                reasons.append("")
            except DoesNotFit as reason:
                reasons.append(str(reason))
    return reasons


def test_optimizers_that_need_whole_matrices_are_refused_parts() -> None:
    fine = ["torch.optim:AdamW", "torch.optim:Rprop", "odd:Counting"]
    in_distributed_tensors = ["torch.optim:Muon", "test_odd_jobs:Clipping", "coupling:ByShape"]
    # Less than what bfloat16 does to Muon is refused where nothing is computed in it.
    coupled = ["torch.optim:Adafactor", "test_odd_jobs:ClippingParts", "test_odd_jobs:OffByLittle"]
    coupled += ["test_odd_jobs:ClipsLaterHere", "coupling:ClipsLargeHere", "coupling:SkipsNaNHere"]
    reasons = launch(split_matrices, [*fine, *in_distributed_tensors, *coupled], size=2)[0]
    assert reasons[:12] == [""] * 12
    assert ["updates a part of a parameter otherwise" in reason for reason in reasons[12:]] == [True] * 12


def why_not_some(optimizer: str, **arguments: Any) -> str:
    """Why an optimizer can't have some of the parameters only; or nothing."""
    cls = references.load(optimizer)
    groups = [
        {"params": [nn.Parameter(torch.ones(6, 4))]},
        {"params": [torch.ones(3, 3)], "weight_decay": 0.1},
    ]
    try:
        refuse_mixing("it", lambda groups: cls(groups, lr=1e-3, **arguments), groups)  # type: ignore[arg-type]
    except DoesNotFit as reason:
        return str(reason)
    return ""


@pytest.mark.parametrize(
    "optimizer", ["AdamW", "Adagrad", "SparseAdam", "Adafactor", "Muon", "NAdam", "Rprop"]
)
def test_optimizers_that_update_each_parameter_by_itself_may_have_some(optimizer: str) -> None:
    assert why_not_some(f"torch.optim:{optimizer}") == ""


MIXING = ["odd:Clipped", "odd:Estimating", "test_odd_jobs:ClipsLater"] + [
    f"coupling:{name}"
    for name in (
        *("ClipsLarge", "EnlargesSmall", "SkipsLarge", "SkipsNaN", "ReadsNeighbours", "ByPlace", "ByNumber"),
        *("SharesState", "ByWeights"),
    )
]


@pytest.mark.parametrize("optimizer", MIXING)
def test_optimizers_that_mix_parameters_need_all_of_them(optimizer: str) -> None:
    assert "together with others than alone" in why_not_some(optimizer)


REFUSED = [
    (True, "torch.optim:SGD", PIPELINE, "several stages share a weight that gets sparse gradients"),
    (False, "torch.optim:SGD", FSDP, "a parameter gets sparse gradients, which FSDP can't exchange"),
    (False, "odd:Clipped", PIPELINE, "together with others than alone"),
]


def test_what_devices_cannot_have_in_parts_is_refused_with_the_reason() -> None:
    with tempfile.TemporaryDirectory() as root:
        requests = []
        for number, (shared, optimizer, strategy, _) in enumerate(REFUSED):
            case = Case("odd:worded", (), "odd:words", optimizer, model_args={"shared": shared})
            request = train_request(a_job(case), strategy, Path(root, str(number)))
            requests.append((request, strategy.devices))
        for outcome, (*_, reason) in zip(run(requests), REFUSED, strict=True):
            assert outcome.refused is not None
            assert reason in outcome.refused


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("block_orders:turned", r"device \d computes .* while device \d computes"),
        ("block_orders:weighed", r"device \d computes .* while device \d computes"),
    ],
)
def test_fsdp_refuses_where_devices_would_exchange_other_things(
    model: str, words: str, tmp_path: Path
) -> None:
    request = train_request(a_job(Case(model, ())), FSDP, tmp_path)
    with pytest.raises(RanksFailedError, match=words) as caught:
        launch(train, request, size=2, hang_seconds=60)
    assert caught.value.failure.status == "does_not_fit"
    assert "by_block=False" in caught.value.failure.reason
