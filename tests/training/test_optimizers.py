"""What a job's optimizer takes: as much as it takes in a plain loop."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saturn_airflow.model.jobs import HParams
from saturn_airflow.parallelism.parallel import Kernels, Parallel, multiply
from saturn_airflow.training.optim.optimizers import make_optimizer, parameter_groups, take_step
from saturn_airflow.training.optim.own_state import OwnState
from saturn_airflow.training.ranks import Ranks


def _optimizer(model: nn.Module, **hparams: Any) -> torch.optim.Optimizer:
    chosen = HParams(optimizer="torch.optim:SGD", **hparams)
    alone = Ranks(rank=0, size=1, device=torch.device("cpu"))
    return make_optimizer(chosen, parameter_groups(chosen, model), Parallel(model, alone))


class Noisy(torch.optim.SGD):
    """Draws by a generator of its own, which something else holds, too."""

    def __init__(self, params: Any, rng: Any) -> None:
        super().__init__(params)
        self.rng = rng
        self.held = [rng]

    def draw(self) -> float:
        own: Any = self.held[0]
        if isinstance(own, torch.Generator):
            return torch.rand((), generator=own).item()
        return float(own.random() if hasattr(own, "random") else own.random_sample())


@pytest.mark.parametrize(
    "make",
    [random.Random, np.random.default_rng, np.random.RandomState, lambda n: torch.Generator().manual_seed(n)],
    ids=["python", "numpy", "numpy's old", "torch"],
)
def test_a_generator_that_an_optimizer_has_goes_on_where_it_stood(make: Callable[[int], Any]) -> None:
    model = nn.Linear(1, 1)
    one = Noisy(model.parameters(), make(3))
    state = OwnState(one)
    one.draw()
    kept = json.loads(json.dumps(state.values()))
    other = Noisy(model.parameters(), make(3))
    OwnState(other).set(kept)
    assert [one.draw(), one.draw()] == [other.draw(), other.draw()]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_sparse_gradients(momentum: float) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    before = model.weight.detach().clone()
    optimizer = _optimizer(model, optimizer_args={"momentum": momentum}, lr=1.0)
    model(torch.tensor([2])).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.detach(), before - torch.eye(5)[2][:, None])


def test_sgd_with_momentum_takes_a_gradient_that_comes_late() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    before = model[1].weight.detach().clone()  # type: ignore[operator]
    optimizer = _optimizer(model, optimizer_args={"momentum": 0.9}, lr=1.0)
    for used in ([model[0]], [model[0], model[1]]):
        optimizer.zero_grad()
        sum(part(torch.ones(2)) for part in used).backward()
        optimizer.step()
    assert torch.equal(model[1].weight.detach(), before - 1)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("kernels", "fused"),
    [("fused", True), ("fused shards", True), ("many at once", None), ("two kinds", True)],
)
def test_adam_updates_all_in_one_kernel_where_it_can(kernels: Kernels, fused: bool | None) -> None:
    model = nn.Linear(2, 1)
    alone = Ranks(rank=0, size=1, device=torch.device("cpu"))
    parallel = Parallel(model, alone, optimizer_kernels=kernels)
    optimizer = make_optimizer(HParams(), parameter_groups(HParams(), model), parallel)
    assert optimizer.defaults["fused"] is fused


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations on parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("optimizer_args", [{}, {"foreach": True}])
def test_parameters_of_two_kinds_take_adams_steps_in_a_kernel_for_each(
    optimizer_args: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    mixed = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    whole = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    whole.load_state_dict(mixed.state_dict())
    mesh = init_device_mesh("cpu", (1,))
    for number, layer in enumerate(mixed):
        cut = distribute_tensor(layer.get_parameter("weight").detach(), mesh, [Shard(number % 2)])
        layer.weight = nn.Parameter(cut)
    alone = Ranks(rank=0, size=1, device=torch.device("cpu"))
    hparams = HParams(lr=0.1, optimizer_args=optimizer_args)
    parallel = Parallel(mixed, alone, optimizer_kernels="two kinds")
    optimizer = make_optimizer(hparams, parameter_groups(hparams, mixed), parallel)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.1)
    given = list(optimizer.param_groups[0]["params"])
    for step in range(3):
        torch.manual_seed(step)
        for one, other in zip(list[torch.Tensor](mixed.parameters()), whole.parameters(), strict=True):
            other.grad = torch.randn_like(other)
            if isinstance(one, DTensor):
                one.grad = distribute_tensor(other.grad, mesh, one.placements)
            else:
                one.grad = other.grad.clone()
        with _Kernels() as kernels:
            take_step(optimizer, hparams, parallel)
        plain.step()
    for one, other in zip(list[torch.Tensor](mixed.parameters()), whole.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor() if isinstance(one, DTensor) else one, other.detach())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], given, strict=True))
    if not optimizer_args:
        assert kernels.names.count("_fused_adamw_") == 2


def test_gradients_are_scaled_all_at_once_by_a_factor_of_their_format() -> None:
    """By one of another format torch multiplies them one after the other."""
    found: list[tuple[int, torch.dtype, torch.dtype]] = []

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._foreach_mul_.Tensor:
                found.append((len(args[0]), args[0][0].dtype, args[1].dtype))
            return func(*args, **(kwargs or {}))

    formats = [torch.float32, torch.float64, torch.bfloat16]
    gradients = [torch.full((2,), 3.0, dtype=dtype) for dtype in formats for _ in range(2)]
    with Seen():  # type: ignore[no-untyped-call]
        multiply(gradients, torch.tensor(0.5, dtype=torch.float64))
    assert all(bool((gradient == 1.5).all()) for gradient in gradients)
    assert {(2, dtype, dtype) for dtype in formats[:2]} == {*found}


@pytest.mark.parametrize("groups", ["named", "named_in_groups"])
def test_parameters_may_come_with_their_names_as_torchs_optimizers_take_them(groups: str) -> None:
    model = nn.Linear(2, 1)
    found = parameter_groups(HParams(parameter_groups=f"loop_jobs:{groups}"), model)
    assert [name for group in found for name in group["params"]] == ["weight", "bias"]
