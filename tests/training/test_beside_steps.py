"""Optimizers that step on a part of the parameters at a time, beside the backward pass of the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from worst_order import WorstOrder

from saturn_airflow.launch.request import DoesNotFit, TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism import spilling
from saturn_airflow.parallelism.beside_steps import BesideSteps
from saturn_airflow.parallelism.block_stream import BlockStream
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training import stepping
from saturn_airflow.training.job_training import Training
from saturn_airflow.training.loop import train
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.optim.in_parts import BY_NUMBER, InParts
from saturn_airflow.training.ranks import Ranks

RANKS = Ranks(rank=0, size=1, device=torch.device("cpu"))
OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {}) for cls in sorted(BY_NUMBER, key=lambda cls: cls.__name__)),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("cls", "options"), OPTIONS)
def test_steps_in_parts_are_those_on_all_at_once(cls: Any, options: dict[str, Any]) -> None:
    def trained(in_parts: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n, 5)) for n in range(1, 7)]
        groups = [
            {"params": parameters[:3]},
            {"params": parameters[3:], "lr": 0.01, "weight_decay": 0.1},
        ]
        optimizer = cls(groups, lr=0.1, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        parts = InParts(optimizer)
        for _ in range(4):
            for parameter in parameters[:-1]:  # the last is in no loss
                parameter.grad = torch.randn_like(parameter)
            if in_parts:
                assert parts
                for chosen in (parameters[4:], parameters[1:4]):
                    parts.step_on(chosen)
                    for parameter in chosen:
                        parameter.grad = None
            optimizer.step()
            scheduler.step()
        return parameters  # type: ignore[return-value]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_optimizers_that_may_do_more_step_on_all_at_once() -> None:
    class Own(torch.optim.SGD):
        pass

    parameters = [nn.Parameter(torch.ones(2))]
    assert not InParts(Own(parameters))
    assert not InParts(torch.optim.LBFGS(parameters))
    hooked = torch.optim.SGD(parameters)
    hook = hooked.register_step_pre_hook(lambda *unused: None)
    assert not InParts(hooked)
    hook.remove()
    assert InParts(hooked)
    hooked.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not InParts(hooked)


def at_once(line: str) -> bool:
    return False


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Calls its blocks as ``calls`` has it."""

    def __init__(self, calls: Callable[[Sequence[nn.Module], torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls(list(self.blocks), x)


def once(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def twice(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return once(blocks, once(blocks, x))


def out_of_order(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return once([blocks[0], blocks[2], blocks[1]], x)  # and one not at all


def thrown_away(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    blocks[1](x)
    return once(blocks, x)


def again_in_the_backward_pass(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    first = blocks[0](x)
    again = checkpoint(lambda y: once(blocks, y), first, use_reentrant=True)
    assert isinstance(again, torch.Tensor)
    return once(blocks, again)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def trained(model: Model, parallel: Parallel, *, beside: bool = True) -> list[torch.Tensor]:
    """The weights after three steps."""
    objective = Objective(Job("j", "x:y", "x:y", "test_beside_steps:mean_square"), model, RANKS.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        if beside:
            parallel.step_beside(optimizer)
        objective.begin(8)
        for number in range(2):
            batch = [torch.randn(4, 6, generator=generator) for _ in range(2)]
            parallel.backward(objective, batch, 4, 1 / 8, number == 1)
        parallel.finish_gradients()
        optimizer.step()
        parallel.drop_gradients()
    return [p.detach().clone() for p in model.parameters()]


def stepped_beside(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that were, as they are."""
    found: list[int] = []
    step = BlockStream._step

    def note(self: Any, step_on: Any, index: int) -> None:
        step(self, step_on, index)
        found.append(index)

    monkeypatch.setattr(BlockStream, "_step", note)
    return found


@pytest.mark.parametrize(
    ("calls", "beside"),
    [(once, [3, 2, 1, 0]), (twice, [3, 2, 1, 0]), (out_of_order, [1, 2, 0]), (thrown_away, [3, 2, 0])],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_block_is_stepped_on_when_it_has_all_its_gradients(
    calls: Any, beside: list[int], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, afterwards, model = Model(calls), Model(calls), Model(calls)
    expected = trained(afterwards, Spilled(afterwards, RANKS, 2, None), beside=False)
    found = stepped_beside(monkeypatch)
    spilled = Spilled(model, RANKS, 2, None, transfers=WorstOrder(lambda line: late))
    got = trained(model, spilled)
    assert all(map(torch.equal, got, expected))
    # Where a block is called twice, gradients are added up in another order.
    close: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5 if calls is twice else 0.0}
    torch.testing.assert_close(got, trained(plain, Parallel(plain, RANKS)), **close)
    assert found == 3 * beside


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_blocks_share_are_stepped_on_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = Model(once), Model(once)
    for one in (plain, model):
        one.blocks[2].linear.weight = one.blocks[0].linear.weight  # type: ignore[union-attr]
        one.blocks[3].linear = one.blocks[1].linear
    found = stepped_beside(monkeypatch)
    got = trained(model, Spilled(model, RANKS, 2, None, transfers=WorstOrder(lambda line: late)))
    assert found == 3 * [1, 0]  # of the others each has but a bias, or nothing
    assert all(map(torch.equal, got, trained(plain, Parallel(plain, RANKS))))


def test_what_would_use_weights_after_their_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(again_in_the_backward_pass)
    with pytest.raises(DoesNotFit, match="computed once more in the backward pass"):
        trained(model, Spilled(model, RANKS, 2, None, transfers=WorstOrder(at_once)))
    # So is what would come of counting calls wrongly.
    step_beside = BlockStream.step_beside
    monkeypatch.setattr(
        BlockStream, "step_beside", lambda self, step_on, uses: step_beside(self, step_on, [1] * len(uses))
    )
    model = Model(twice)
    with pytest.raises(DoesNotFit, match="computed once more in the backward pass"):
        trained(model, Spilled(model, RANKS, 2, None, transfers=WorstOrder(at_once)))


def test_without_that_refusal_weights_would_be_stepped_on_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockStream, "_check_not_stepped", lambda self, index: None)
    plain, model = Model(again_in_the_backward_pass), Model(again_in_the_backward_pass)
    got = trained(model, Spilled(model, RANKS, 2, None, transfers=WorstOrder(at_once)))
    expected = trained(plain, Parallel(plain, RANKS))
    assert max(float((one - other).abs().max()) for one, other in zip(got, expected, strict=True)) > 1e-3


def test_gradients_take_the_memory_of_one_block() -> None:
    model = Model(once)
    spilled = Spilled(model, RANKS, 2, None, transfers=WorstOrder(at_once))
    objective = Objective(Job("j", "x:y", "x:y", "test_beside_steps:mean_square"), model, RANKS.device)
    spilled.step_beside(torch.optim.SGD(model.parameters(), lr=0.1))
    objective.begin(4)
    spilled.backward(objective, [torch.randn(4, 6), torch.randn(4, 6)], 4, 1 / 4, True)
    spilled.finish_gradients()
    assert not spilled._stream._gradients
    assert sum(map(len, spilled._stream._spare.values())) == len(list(model.blocks[0].parameters()))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_where_the_loss_is_no_number_nothing_is_stepped_on(wrong: float) -> None:
    model = Model(once)
    before = [p.detach().clone() for p in model.parameters()]
    spilled = Spilled(model, RANKS, 2, None, transfers=WorstOrder(lambda line: True))
    objective = Objective(Job("j", "x:y", "x:y", "test_beside_steps:mean_square"), model, RANKS.device)
    spilled.step_beside(torch.optim.SGD(model.parameters(), lr=0.1))
    objective.begin(4)
    spilled.backward(objective, [torch.randn(4, 6), torch.full((4, 6), wrong)], 4, 1 / 4, True)
    spilled.finish_gradients()
    assert all(p.grad is not None for p in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))


def test_a_step_waits_for_the_loss() -> None:
    model = Model(once)
    before = [p.detach().clone() for p in model.parameters()]
    steps = BesideSteps(model, RANKS.device, WorstOrder(lambda line: True))
    steps.begin(torch.optim.SGD(model.parameters(), lr=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert steps.of_micro_batch((torch.tensor(1.0), torch.tensor(2.0)), 8, last=False) is None
    step_on = steps.of_micro_batch((torch.tensor(1.0), torch.tensor(2.0)), 8, last=True)
    assert step_on is not None
    assert step_on(list(model.parameters()))
    # Divided by 8 samples, of which 4 counted.
    assert all(torch.equal(p, b - 1.0) for p, b in zip(model.parameters(), before, strict=True))


def test_hooks_of_the_backward_pass_see_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(once)
    model.blocks[1].register_full_backward_hook(lambda *unused: None)
    found = stepped_beside(monkeypatch)
    trained(model, Spilled(model, RANKS, 2, None, transfers=WorstOrder(at_once)))
    assert found == []


def some_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *(Block() for _ in range(4)), nn.Linear(6, 3))


def train_late(requests: list[TrainRequest], ranks: Ranks) -> list[tuple[list[float], int]]:
    """The losses of each training, and on how many blocks it stepped beside; transfers come late."""
    spilling.on = lambda device: WorstOrder(lambda line: True)  # type: ignore[attr-defined]
    found = []
    step, step_with = BlockStream._step, BlockStream._step_with
    for request in requests:
        losses: list[float] = []
        stepped = [0]

        def note(self: Any, step_on: Any, index: int, stepped: list[int] = stepped) -> None:
            step(self, step_on, index)
            stepped[0] += all(p.grad is None for p in self._weights[index])

        def heard(event: dict[str, Any], losses: list[float] = losses) -> None:
            losses.extend([event["loss"]] if event["event"] == "step" else [])

        def note_later(self: Any, prepared: Any, taken: Any, stepped: list[int] = stepped) -> None:
            step_with(self, prepared, taken)
            stepped[0] += 1

        BlockStream._step = note  # type: ignore[method-assign]
        BlockStream._step_with = note_later  # type: ignore[assignment, method-assign]
        train(request, dataclasses.replace(ranks, _emit=heard))
        found.append((losses, stepped[0]))
    return found


@pytest.mark.ranks
def test_the_loop_trains_as_one_device_does(tmp_path: Path) -> None:
    hparams = HParams(
        epochs=2,
        batch_size=8,
        accumulate=2,
        lr=0.05,
        lr_scheduler="torch.optim.lr_scheduler:ExponentialLR",
        lr_scheduler_args={"gamma": 0.9},
    )
    jobs = [
        Job("j", "test_beside_steps:some_blocks", "loop_jobs:points", "loop_jobs:loss", hparams=one)
        for one in (hparams, dataclasses.replace(hparams, clip_grad_norm=0.1))
    ]
    requests = [
        TrainRequest(
            job=job,
            technique=technique,
            folder=str(tmp_path / f"{technique}-{number}"),
            checkpoint_batches=2,
        )
        for number, job in enumerate(jobs)
        for technique in ("single", "spill")
    ]
    ((single, spilled, clipped, spilled_clipped),) = ranks_module.launch(train_late, requests, size=1)
    assert spilled[0] == single[0]
    # The last step is looked at, and taken at once.
    assert spilled[1] == 4 * (len(single[0]) - 1)
    assert spilled_clipped[0] == clipped[0]
    # From the first step on, whose two micro-batches were watched, each in the pass that follows.
    assert spilled_clipped[1] == 4 * (len(clipped[0]) - 1)


def clipped(model: Model, **spilled: Any) -> tuple[list[torch.Tensor], int]:
    """The weights after five clipped steps, and on how many blocks a step was taken later."""
    parallel = Spilled(model, RANKS, 2, None, **spilled) if spilled else Parallel(model, RANKS)
    objective = Objective(Job("j", "x:y", "x:y", "test_beside_steps:mean_square"), model, RANKS.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    later = 0
    for _ in range(5):
        objective.begin(4)
        batch = [torch.randn(4, 6, generator=generator) for _ in range(2)]
        parallel.backward(objective, batch, 4, 1 / 4, True)
        parallel.finish_gradients()
        parallel.step_later(optimizer)
        parallel.clip_gradients(0.1)
        later += sum(block.linear.weight.grad is None for block in model.blocks)  # type: ignore[union-attr]
        optimizer.step()
        parallel.drop_gradients()
    parallel.complete_steps()
    return [p.detach().clone() for p in model.parameters()], later


def reads_weights(blocks: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return once(blocks, x) / float(blocks[3].linear.weight.detach().norm())  # type: ignore[no-any-return, operator, union-attr]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("calls", "later"), [(once, 16), (twice, 16), (reads_weights, 0)])
def test_clipped_steps_are_taken_in_the_next_pass_where_nobody_else_looks(
    calls: Any, later: int, late: bool
) -> None:
    plain, _ = clipped(Model(calls))
    got, found = clipped(Model(calls), transfers=WorstOrder(lambda line: late))
    torch.testing.assert_close(got, plain, rtol=0.0, atol=1e-5 if calls is twice else 0.0)
    assert found == later


def test_hooks_of_the_forward_pass_see_weights_after_all_of_a_step() -> None:
    plain, model = Model(once), Model(once)
    for one in (plain, model):
        one.register_forward_pre_hook(lambda *unused: None)
    expected, _ = clipped(plain)
    got, found = clipped(model, transfers=WorstOrder(lambda line: True))
    assert all(map(torch.equal, got, expected))
    assert found == 0


def test_a_job_that_clips_has_all_gradients_first(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    class Told(Parallel):
        def step_beside(self, optimizer: torch.optim.Optimizer) -> None:
            told.append(clips)

    def enough(*unused: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(stepping, "_backward", enough)
    for clips in (True, False):
        training = object.__new__(Training)
        training.hparams = HParams(clip_grad_norm=1.0 if clips else None)
        training.parallel = Told(Model(once), RANKS)
        training.optimizer = torch.optim.SGD(training.parallel.model.parameters())
        training.step, training.spot_checks = 1, None
        with pytest.raises(InterruptedError):
            training._train_step(None, False)  # type: ignore[arg-type]
    assert told == [False]
