"""Resumed is uninterrupted: a job stopped under one strategy goes on under any other as if it never was."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cells import Outcome, Strategy, deviation, job, run
from cells import request as train_request

from saturn_airflow.model.jobs import HParams, Job

Record = Callable[[str, float, float], None]
# One fixture runs all cells: beside the other half of the suite that is more than the usual five minutes.
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(2400)]

LOSSES, WEIGHTS = 1e-12, 1e-11
STEPS = 6  # in two epochs: 16 samples in batches of 6, the last one of 4
STOPPED_AT = 2
# Where the way to the end is known from others, it goes on as far as into the next epoch.
SHORT = 4

STRATEGIES = [
    Strategy("single"),
    Strategy("spill"),
    Strategy("ddp", 2),
    Strategy("ddp", 4),
    Strategy("fsdp", 2),
    Strategy("fsdp", 4),
    Strategy("tensor", 2),
    Strategy("tensor", 4),
    Strategy("pipeline", 2),
    Strategy("pipeline", 4),
]
SOME = [STRATEGIES[0], STRATEGIES[1], STRATEGIES[3], STRATEGIES[4], STRATEGIES[6], STRATEGIES[9]]

ADAMW = HParams(
    epochs=2,
    precision="float64",
    lr=1e-2,
    accumulate=2,
    parameter_groups="tiny:two_groups",
    lr_scheduler="torch.optim.lr_scheduler:OneCycleLR",
    lr_scheduler_args={"max_lr": 0.02, "total_steps": 20},
)
SGD = HParams(
    epochs=2, precision="float64", lr=0.1, optimizer="torch.optim:SGD", optimizer_args={"momentum": 0.9}
)

FEW = {"samples": 16}
# Llama is what every technique can train; its output is tied to its embedding where that is said.
JOBS: dict[str, tuple[Job, list[Strategy]]] = {
    "adamw, two groups, tied": (job(load_model="tiny:tied_llama", data_args=FEW, hparams=ADAMW), STRATEGIES),
    "momentum, frozen": (job(load_model="tiny:frozen_llama", data_args=FEW, hparams=SGD), SOME),
}


def pairs_of(strategies: list[Strategy]) -> list[tuple[Strategy, Strategy]]:
    """Each strategy before and after itself, one device, and one of another technique, three places on.

    Not all with all: a checkpoint is read alike whoever wrote it.
    """
    count = len(strategies)
    return [
        (strategies[before], strategies[after])
        for before in range(count)
        for after in range(count)
        if 0 in (before, after) or (after - before) % count in (0, 3, count - 3)
    ]


PAIRS = [(name, *pair) for name, (_, strategies) in JOBS.items() for pair in pairs_of(strategies)]


def steps_of(before: Strategy, after: Strategy) -> int:
    """Where a resumed run ends: the job's end where either is one device, or both are the same."""
    return STEPS if before == after or STRATEGIES[0] in (before, after) else SHORT


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[tuple[str, str, str], Outcome]:
    """What the resumed run of every chosen pair did, and the uninterrupted ones, by how far they go."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pairs = [pair for pair in PAIRS if dict(zip(("name", "before", "after"), pair, strict=True)) in chosen]
    with tempfile.TemporaryDirectory() as root:
        keys: list[tuple[str, str, str]] = []
        requests = []
        first = []
        for name, (a_job, _) in JOBS.items():
            for steps in (SHORT, STEPS):
                folder = Path(root, name, f"whole-{steps}")
                keys.append((name, "", str(steps)))
                requests.append((train_request(a_job, STRATEGIES[0], folder, batch_count=steps), 1))
            for before in [s for s in JOBS[name][1] if any(p[:2] == (name, s) for p in pairs)]:
                folder = Path(root, name, str(before))
                first.append((train_request(a_job, before, folder, batch_count=STOPPED_AT), before.devices))
        run(first)
        for name, before, after in pairs:
            folder = Path(root, name, f"{before} to {after}")
            shutil.copytree(Path(root, name, str(before)), folder)
            keys.append((name, str(before), str(after)))
            steps = steps_of(before, after)
            left = None if steps == STEPS else steps - STOPPED_AT
            requests.append((train_request(JOBS[name][0], after, folder, batch_count=left), after.devices))
        return dict(zip(keys, run(requests), strict=True))


@pytest.mark.parametrize(("name", "before", "after"), PAIRS, ids=str)
def test_continues_as_if_uninterrupted(
    name: str,
    before: Strategy,
    after: Strategy,
    outcomes: dict[tuple[str, str, str], Outcome],
    record_deviation: Record,
) -> None:
    steps = steps_of(before, after)
    resumed, whole = outcomes[name, str(before), str(after)], outcomes[name, "", str(steps)]
    assert list(resumed.losses) == list(range(STOPPED_AT + 1, steps + 1))
    rest = {step: loss for step, loss in whole.losses.items() if step > STOPPED_AT}
    losses, weights = deviation(resumed, dataclasses.replace(whole, losses=rest))
    record_deviation("resume", losses, weights)
    assert losses <= LOSSES
    assert weights <= WEIGHTS


WITH_DROPOUT = job(
    load_model="tiny:dropping",
    load_dataloader="tiny:vectors",
    loss_function="tiny:vector_loss",
    hparams=HParams(epochs=2, precision="float64", lr=1e-2, accumulate=2),
)
# Where ranks have shares of the batch or stages of the model, they draw other masks than one device does.
OWN_MASKS = [Strategy("ddp", 2), Strategy("fsdp", 2), Strategy("pipeline", 2)]
SAME_MASKS = [Strategy("spill"), Strategy("tensor", 2), Strategy("fsdp", 1)]


@pytest.mark.parametrize("strategies", [[Strategy("single"), *OWN_MASKS, *SAME_MASKS]], ids=["all"])
def test_with_dropout_the_same_strategy_continues_exactly(strategies: list[Strategy], tmp_path: Path) -> None:
    whole = run([(train_request(WITH_DROPOUT, s, tmp_path / f"{s} whole"), s.devices) for s in strategies])
    first = [
        (train_request(WITH_DROPOUT, s, tmp_path / f"{s}", batch_count=3), s.devices) for s in strategies
    ]
    rest = [(train_request(WITH_DROPOUT, s, tmp_path / f"{s}"), s.devices) for s in strategies]
    for strategy, one, before, after in zip(strategies, whole, run(first), run(rest), strict=True):
        parts = dataclasses.replace(after, losses={**before.losses, **after.losses})
        assert deviation(one, parts) == (0.0, 0.0), strategy
        if strategy in SAME_MASKS:
            losses, weights = deviation(one, whole[0])
            assert losses <= LOSSES, strategy
            assert weights <= WEIGHTS, strategy
