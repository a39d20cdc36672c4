"""Running cells on ranks, many in one launch; what crashes or hangs takes no other cell with it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from families.cells import Cell, first_steps, reference_key, references, truths
from families.family import find
from saturn_airflow.jobs import HParams, Job
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.checkpoints import read_weights
from saturn_airflow.training.failures import RanksFailedError
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks
from saturn_airflow.training.request import DoesNotFit, TrainRequest

#: The largest difference of a cell that is exact, in losses and weights relative to their size.
EXACT, EXACT_IN_FLOAT32 = 1e-9, 1e-5
#: Muon rounds gradients to bfloat16: what differs by 1e-16 may be rounded otherwise.
EXACT_IN_BFLOAT16 = 1e-3
#: A cell that gives no sign for so long hangs.
SECONDS_PER_CELL = 40.0
#: Steps of a training that is resumed.
STEPS_BEFORE = 2


@dataclass
class Result:
    """What became of a cell.

    :param verdict: ``exact``, ``refused``, ``drawn`` (other random numbers than those of one device),
        ``wrong`` or ``error``.
    :param why: of what was refused or raised; else what differs most.
    :param losses: the largest relative difference of a loss; likewise ``weights``.
    """

    verdict: str
    why: str = ""
    losses: float | None = None
    weights: float | None = None


class TooSlowError(Exception):
    """A cell took longer than it may."""


def job_of(cell: Cell) -> Job:
    """The cell as a user of Saturn writes it."""
    made = cell.recipe
    return Job(
        made.family,
        load_model="families.family:model",
        model_args={"family": made.family},
        load_dataloader="families.family:data",
        data_args={"family": made.family},
        loss_function=find(made.family).loss,
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
        job=job_of(cell).to_dict(),
        technique=cell.strategy.technique,
        parameters=dict(cell.strategy.parameters),
        folder=str(folder),
        batch_count=steps,
        checkpoint_seconds=None,
    )


def train_all(requests: list[tuple[int, TrainRequest]], ranks: Ranks) -> None:
    """Run each request on these ranks, one after the other, and tell how each ends."""
    for number, one in requests:
        ranks.emit("begins", cell=number)
        try:
            train(one, dataclasses.replace(ranks, _emit=_only_steps(ranks)))
        except DoesNotFit as reason:
            ranks.emit("refused", cell=number, why=str(reason))
        else:
            ranks.emit("ends", cell=number)
        # Where only some of the ranks refuse, the others wait here for them.
        ranks.barrier()


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
    begun: dict[int, Result] = {}
    for size in (1, 2, 3):
        first = [(n, first_steps(c)) for n, c in numbered if c.after and c.after.devices == size]
        outcomes = _run(first, size, folder, STEPS_BEFORE)
        begun |= {n: result for n, (result, _) in outcomes.items() if result}
    for size in (1, 2, 3):
        own = [(n, c) for n, c in numbered if n not in begun and c.strategy.devices == size]
        for start in range(0, len(own), 40):
            outcomes = _run(own[start : start + 40], size, folder, None)
            for number, (result, losses) in outcomes.items():
                cell = cells[number]
                on_result(cell, result or compare(cell, losses, folder, number))
    for number, result in begun.items():
        on_result(cells[number], result)


def _run(
    cells: list[tuple[int, Cell]], size: int, folder: Path, steps: int | None
) -> dict[int, tuple[Result | None, dict[int, float]]]:
    """How each cell ended: a verdict where there already is one, and its losses by step."""
    left = [(number, request_of(cell, folder / f"cell-{number}", steps)) for number, cell in cells]
    outcomes: dict[int, tuple[Result | None, dict[int, float]]] = {}
    while left:
        watched = _Watched()
        try:
            ranks_module.launch(train_all, left, size=size, on_event=watched.hear, poll=watched.check)
        except RanksFailedError as failure:
            watched.end(Result("error", _shortly(failure)))
        except TooSlowError:
            watched.end(Result("error", f"hangs: no step in {SECONDS_PER_CELL:.0f} seconds"))
        outcomes |= watched.outcomes
        left = [(number, request) for number, request in left if number not in outcomes]
    return outcomes


class _Watched:
    """What is heard from ranks."""

    def __init__(self) -> None:
        self.outcomes: dict[int, tuple[Result | None, dict[int, float]]] = {}
        self.cell: int | None = None
        self.losses: dict[int, float] = {}
        self.heard = time.monotonic()

    def hear(self, event: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        if event["event"] == "begins":
            self.cell, self.losses = event["cell"], {}
        elif event["event"] == "step":
            self.losses[event["step"]] = event["loss"]
        elif event["event"] == "refused":
            self.end(Result("refused", event["why"]))
        elif event["event"] == "ends":
            self.end(None)

    def end(self, result: Result | None) -> None:
        if self.cell is not None:
            self.outcomes[self.cell] = (result, self.losses)
            self.cell = None
        elif result is not None:
            raise RuntimeError(f"the ranks failed between cells: {result.why}")

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
    for number, (result, losses) in _run(chosen, 1, folder, None).items():
        cell = dict(chosen)[number]
        outcome: dict[str, Any] = {"error": result.why} if result else {"losses": [*losses.values()]}
        if not result:
            outcome["weights"] = _weights(folder, number)
        torch.save(outcome, folder / f"{reference_key(cell)}.pt")


def compare(cell: Cell, losses: dict[int, float], folder: Path, number: int) -> Result:
    """The verdict on a cell that was trained."""
    family = find(cell.recipe.family)
    truth = torch.load(folder / f"{reference_key(cell)}.pt")
    if "error" in truth:
        return Result("error", f"what it is compared with fails: {truth['error'].splitlines()[-1]}")
    weights = _weights(folder, number)
    expected = dict(enumerate(truth["losses"], 1))
    if cell.after:
        expected = {step: loss for step, loss in expected.items() if step > STEPS_BEFORE}
    if losses.keys() != expected.keys():
        return Result("wrong", f"steps {sorted(losses)} in the place of {sorted(expected)}")
    if weights.keys() != truth["weights"].keys():
        return Result("wrong", f"other weights: {sorted(weights.keys() ^ truth['weights'].keys())[:4]}")
    off_losses = max(_off(losses[step], loss) for step, loss in expected.items())
    off = {name: float(_off_tensor(weights[name], tensor)) for name, tensor in truth["weights"].items()}
    worst = max(off, key=lambda name: off[name] if off[name] == off[name] else float("inf"))
    bound = EXACT_IN_FLOAT32 if family.single_precision else EXACT
    bound = EXACT_IN_BFLOAT16 if cell.recipe.optimizer.endswith("Muon") else bound
    if off_losses <= bound and off[worst] <= 10 * bound:
        return Result("exact", "", off_losses, off[worst])
    return Result("drawn" if family.random else "wrong", worst, off_losses, off[worst])


def _weights(folder: Path, number: int) -> dict[str, torch.Tensor]:
    return read_weights(max((folder / f"cell-{number}" / "checkpoints").glob("step-*")))


def _off(one: float, other: float) -> float:
    return abs(one - other) / max(1.0, abs(other))


def _off_tensor(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.numel() == 0:
        return torch.zeros(())
    one, other = one.reshape(other.shape).double(), other.double()
    return ((one - other).abs() / other.abs().clamp(min=1.0)).max()


def _shortly(failure: RanksFailedError) -> str:
    text = str(failure).strip()
    return text if len(text) < 1500 else f"{text[:500]} ... {text[-1000:]}"


def warm_up() -> None:
    """Start the server that ranks are forked from, with what the families need imported in it."""
    here = str(Path(__file__).parents[1])
    if here not in sys.path:
        sys.path.insert(0, here)
    forkserver.set_forkserver_preload(["saturn_airflow.training.warm_server", "families.warm"])
    forkserver.ensure_running()
