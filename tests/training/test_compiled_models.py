"""Models that are compiled as a whole, in parts or by blocks, where techniques run blocks one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worst_order import WorstOrder

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism.blocks import blocks_to_run
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.ranks import Ranks


def as_a_whole() -> nn.Module:
    compiled: nn.Module = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), backend="eager")  # type: ignore[assignment]
    return compiled


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.compile(backend="eager")
    return model


def compiled_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (as_a_whole, "a model that"),
        (compiled_in_place, "a model that its compile"),
        (compiled_forward, "a model that"),
        (lambda: nn.Sequential(nn.Linear(2, 3), compiled_in_place()), "a model whose part '1'"),
    ],
)
def test_what_is_compiled_around_blocks_says_how_to_compile_blocks(
    make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(DoesNotFit, match=rf"{words}.*HParams\(compile=True\)"):
        blocks_to_run(make())


def test_what_is_compiled_beside_blocks_is_run_as_it_is() -> None:
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    beside = nn.Linear(2, 2)
    for module in (*blocks, beside):
        module.compile(backend="eager")
    assert len(blocks_to_run(nn.ModuleDict({"blocks": blocks, "beside": beside}))) == 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets).square().mean()


def trained(precision: str, wrap: Callable[[nn.Module], Parallel]) -> list[torch.Tensor]:
    """Losses and weights of three steps."""
    torch.manual_seed(0)
    # More blocks than torch compiles one function for.
    model = nn.Sequential(nn.Linear(4, 6), *(Block() for _ in range(10)), nn.Linear(6, 3))
    batch = [torch.randn(5, 4), torch.randn(5, 3)]
    job = Job("j", "x:y", "x:y", "test_compiled_models:mean_square", hparams=HParams(precision=precision))
    parallel = wrap(model)
    objective = Objective(job, model, parallel.ranks.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        parallel.step_beside(optimizer)
        objective.begin(5)
        losses.append(parallel.backward(objective, batch, 5, 1 / 5, True)[0])
        parallel.finish_gradients()
        optimizer.step()
        parallel.drop_gradients()
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_that_are_compiled_are_streamed_whole(backend: str, precision: str, tmp_path: Path) -> None:
    """Each is one graph, whose weights come from the host: nothing of the streaming is compiled, and none is
    compiled again for each block."""
    graphs: list[Any] = []
    own = torch._dynamo.lookup_backend(backend)

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return own(graph, inputs)

    def spilled(model: nn.Module) -> Parallel:
        for block in list(model.children())[1:-1]:
            block.compile(backend=counting, fullgraph=True)  # which raises where a graph breaks
        return Spilled(model, ranks, 2, None, transfers=WorstOrder(lambda line: True))

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
        plain = trained(precision, lambda model: Parallel(model, ranks))
        for one, other in zip(trained(precision, spilled), plain, strict=True):
            torch.testing.assert_close(one, other)
        assert 0 < len(graphs) <= 4
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
