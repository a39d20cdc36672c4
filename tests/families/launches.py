"""Running cells on ranks, many in one launch; what crashes or hangs takes no other cell with it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from families.family import find
from families.matrix import Cell, first_steps, reference_keys, references, truths
from families.verdicts import STEPS_BEFORE, Outcome, Result, judge, weights_in
from saturn_airflow.launch.failures import RanksFailedError
from saturn_airflow.launch.request import ChangesResultError, DoesNotFit, TrainRequest
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.guarding.guarded import check
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

#: A cell that gives no sign for so long hangs, on a busy machine too.
SECONDS_PER_CELL = 300.0
#: Ranks that refuse do so within so long of each other.
SECONDS_TO_REFUSE = timedelta(seconds=20)


class TooSlowError(Exception):
    """A cell took longer than it may."""


def job_of(cell: Cell) -> Job:
    """The cell as a user of Saturn writes it."""
    made = cell.recipe
    return Job(
        made.key,
        **find(made.family).job,
        load_model="families.family:model",
        model_args={"family": made.family},
        load_dataloader="families.family:data",
        data_args={"family": made.family},
        loss_function=find(made.family).loss,
        trust=["single"] if find(made.family).couples and cell.strategy.accumulate > 1 else [],
        hparams=HParams(
            epochs=made.epochs,
            precision="float64",
            optimizer=made.optimizer,
            optimizer_args=made.optimizer_args,
            lr=made.lr,
            clip_grad_norm=made.clip_grad_norm,
            parameter_groups=made.parameter_groups,
            accumulate=cell.strategy.accumulate,
        ),
    )


def request_of(cell: Cell, folder: Path, steps: int | None = None) -> TrainRequest:
    return TrainRequest(
        job=job_of(cell),
        technique=cell.strategy.technique,
        parameters=dict(cell.strategy.parameters),
        folder=str(folder),
        batch_count=steps,
        checkpoint_seconds=None,
    )


def train_all(requests: list[tuple[int, TrainRequest]], ranks: Ranks) -> None:
    """Run each request on these ranks, one after the other, as a trial and the training after it would."""
    for number, one in requests:
        ranks.emit("begins", cell=number)
        try:
            _guard(one, ranks)
            train(one, dataclasses.replace(ranks, _emit=_only_steps(ranks)))
        except DoesNotFit as reason:
            ranks.emit("does_not_fit", why=str(reason))
            _meet_the_others(reason)
        else:
            ranks.emit("ends")
            ranks.barrier()


def _meet_the_others(reason: DoesNotFit) -> None:
    """Go on together where all ranks refuse.

    :raises DoesNotFit: where only some do, and the others wait for them elsewhere: it ends them all.
    """
    try:
        dist.monitored_barrier(timeout=SECONDS_TO_REFUSE)
    except RuntimeError:
        raise reason from None


def _guard(one: TrainRequest, ranks: Ranks) -> None:
    """What the guard says. Where it refuses, the training shows what would become of it without the guard.

    :raises DoesNotFit: where there is nothing to be trained.
    """
    try:
        ranks.emit("guarded", verdict=check(one, ranks)["guard"])
    except ChangesResultError as reason:
        ranks.emit("guarded", verdict="refused", why=str(reason))


def _only_steps(ranks: Ranks) -> Callable[[dict[str, Any]], None]:
    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            ranks.emit("step", step=event["step"], loss=event["loss"])

    return emit


def run(cells: list[Cell], folder: Path, on_result: Callable[[Cell, Result], None]) -> None:
    """Run cells next to their truths; ``on_result`` hears of each as soon as it is known."""
    warm_up()
    folder.mkdir(parents=True, exist_ok=True)
    find_truths(cells, folder)
    find_references(cells, folder)
    numbered = list(enumerate(cells))
    begun: dict[int, Outcome] = {}
    for size in (1, 2, 3):
        first = [(n, first_steps(c)) for n, c in numbered if c.after and c.after.devices == size]
        outcomes = _run(first, size, folder, STEPS_BEFORE)
        begun |= {n: outcome for n, outcome in outcomes.items() if outcome.ended or outcome.refused}
    for size in (1, 2, 3):
        own = [(n, c) for n, c in numbered if n not in begun and c.strategy.devices == size]
        for start in range(0, len(own), 40):
            outcomes = _run(own[start : start + 40], size, folder, None)
            for number, outcome in outcomes.items():
                on_result(cells[number], judge(cells[number], outcome, folder / f"cell-{number}", folder))
    for number, outcome in begun.items():
        on_result(cells[number], judge(cells[number], outcome, folder / f"cell-{number}", folder))


def _run(cells: list[tuple[int, Cell]], size: int, folder: Path, steps: int | None) -> dict[int, Outcome]:
    """How each cell ended."""
    left = [(number, request_of(cell, folder / f"cell-{number}", steps)) for number, cell in cells]
    outcomes: dict[int, Outcome] = {}
    while left:
        watched = _Watched()
        try:
            ranks_module.launch(train_all, left, size=size, on_event=watched.hear, poll=watched.check)
        except RanksFailedError as failed:
            if failed.failure.status in ("does_not_fit", "changes_result"):
                watched.refused(str(failed))
            else:
                watched.end(Result("error", _shortly(failed)))
        except TooSlowError:
            watched.end(Result("error", f"hangs: no step in {SECONDS_PER_CELL:.0f} seconds"))
        outcomes |= watched.outcomes
        left = [(number, request) for number, request in left if number not in outcomes]
    return outcomes


class _Watched:
    """What is heard from ranks."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.cell: int | None = None
        self.now = Outcome()
        self.heard = time.monotonic()

    def hear(self, event: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        if event["event"] == "begins":
            self.cell, self.now = event["cell"], Outcome()
        elif event["event"] == "guarded":
            self.now.guard, self.now.refused = event["verdict"], event.get("why")
        elif event["event"] == "step":
            self.now.losses[event["step"]] = event["loss"]
        elif event["event"] == "does_not_fit":
            self.end(Result("refused", event["why"]))
        elif event["event"] == "ends":
            self.end(None)

    def end(self, result: Result | None) -> None:
        if self.cell is not None:
            self.now.ended = result
            self.outcomes[self.cell] = self.now
            self.cell = None
        elif result is not None:
            raise RuntimeError(f"the ranks failed between cells: {result.why}")

    def refused(self, why: str) -> None:
        """Of one of the ranks; where it is the first, its reason was heard."""
        if self.cell is not None:
            self.end(Result("refused", why))

    def check(self) -> bool:
        if time.monotonic() - self.heard > SECONDS_PER_CELL:
            raise TooSlowError
        return False


def find_truths(cells: Iterable[Cell], folder: Path) -> None:
    """Train the plain loops of cells in a process of their own, which can't import Saturn unnoticed."""
    missing = [recipe for recipe in truths(cells) if not (folder / f"{recipe.key}.pt").exists()]
    if missing:
        lines = "\n".join(json.dumps(asdict(recipe)) for recipe in missing)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "families.truth", str(folder)]
        subprocess.run(command, input=lines, text=True, check=True, env=environment)


def find_references(cells: Iterable[Cell], folder: Path) -> None:
    """Train what cells of random families are compared with."""
    chosen = list(enumerate(references(cells), 10**6))
    for number, outcome in _run(chosen, 1, folder, None).items():
        cell = dict(chosen)[number]
        told: dict[str, Any] = {"losses": [*outcome.losses.values()]}
        if outcome.ended:
            told = {"error": outcome.ended.why}
        else:
            told["weights"] = weights_in(folder / f"cell-{number}")
        torch.save(told, folder / f"{reference_keys(cell)[0]}.pt")


def _shortly(failure: RanksFailedError) -> str:
    text = str(failure).strip()
    return text if len(text) < 1500 else f"{text[:500]} ... {text[-1000:]}"


def warm_up() -> None:
    """Start the server that ranks are forked from, with what the families need imported in it."""
    here = str(Path(__file__).parents[1])
    if here not in sys.path:
        sys.path.insert(0, here)
    forkserver.set_forkserver_preload(["saturn_airflow.launch.warm_server", "families.warm"])
    forkserver.ensure_running()
