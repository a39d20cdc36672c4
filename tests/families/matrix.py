"""The cells of the matrix: a family trained by a recipe under a strategy, or begun under another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from families.family import families, find
from families.truth import Recipe

Choice = TypeVar("Choice")

#: Kinds of families that are resumed in their second epoch.
_REMEMBERING = ("data that remember", "state beside the data")


@dataclass(frozen=True)
class Strategy:
    """A technique with its parameters on ``devices`` devices, each batch in ``accumulate`` parts."""

    technique: str
    devices: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1

    def __str__(self) -> str:
        tuned = [f"{key}={value}" for key, value in self.parameters.items()]
        tuned += [f"accumulate={self.accumulate}"] * (self.accumulate > 1)
        return f"{self.technique} on {self.devices}" + f" ({', '.join(tuned)})" * bool(tuned)


@dataclass(frozen=True)
class Cell:
    """One training: ``recipe`` under ``strategy``.

    :param after: where it is begun under another strategy and resumed under ``strategy`` after two steps.
    """

    recipe: Recipe
    strategy: Strategy
    after: Strategy | None = None

    @property
    def name(self) -> str:
        """Its place in the table."""
        optimizer = ""
        if self.recipe.optimizer != Recipe("").optimizer:
            optimizer = f", {self.recipe.optimizer.removeprefix('torch.optim:')}"
        begun = f"{self.after}, then " if self.after else ""
        return f"{self.recipe.family}{optimizer}: {begun}{self.strategy}"


#: What every family is tried under.
ALWAYS = (
    Strategy("single"),
    Strategy("single", accumulate=2),
    Strategy("ddp", 3),
    Strategy("fsdp", 2),
    Strategy("tensor", 2),
    Strategy("pipeline", 2),
    Strategy("spill"),
)
#: Of these every family is tried under some, in turns.
IN_TURNS = (
    Strategy("single", parameters={"recompute": True}),
    Strategy("ddp", 2),
    Strategy("fsdp", 3, {"keep_gathered": True}),
    Strategy("pipeline", 3, {"schedule": "gpipe", "micro_batches": 3}),
    Strategy("spill", accumulate=2),
    Strategy("ddp", 2, {"recompute": True}, accumulate=2),
    Strategy("tensor", 3),
    Strategy("fsdp", 2, {"recompute": True}, accumulate=2),
)
TURNS = 3
STRATEGIES = ALWAYS + IN_TURNS
#: One of each, for what is not about the strategies.
PLAIN = tuple(
    Strategy(name, 1 if name in ("single", "spill") else 2)
    for name in ("single", "ddp", "fsdp", "tensor", "pipeline", "spill")
)

# With more steps of its iteration it blows up what is left of gradients of low rank in bfloat16.
MUON = {
    "lr": 0.1,
    "optimizer_args": {"ns_steps": 1},
    "parameter_groups": "families.optimizers:matrices",
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim:Adam": {"lr": 0.01, "optimizer_args": {"amsgrad": True}},
    "torch.optim:AdamW": {"lr": 0.01},
    "torch.optim:NAdam": {"lr": 0.01},
    "torch.optim:RAdam": {"lr": 0.01},
    "torch.optim:Adagrad": {"lr": 0.05},
    "torch.optim:RMSprop": {"lr": 0.01, "optimizer_args": {"momentum": 0.5, "centered": True}},
    "torch.optim:Adadelta": {"lr": 0.5},
    "torch.optim:Adamax": {"lr": 0.01},
    "torch.optim:ASGD": {"lr": 0.05},
    "torch.optim:Rprop": {"lr": 0.01},
    "torch.optim:Adafactor": {"lr": 0.01},
    "transformers:Adafactor": {
        "lr": 0.01,
        "optimizer_args": {"relative_step": False, "scale_parameter": False},
    },
    "torch.optim:Muon": MUON,
    "families.optimizers:CountsInGroups": {"lr": 0.05},
    "families.optimizers:KeepsHistory": {"lr": 0.05},
    **{
        f"families.inventions:{name}": {"lr": 0.01}
        for name in (
            *("Lamb", "Lars", "Shampoo", "Lion", "Sophia", "EightBit", "Lookahead"),
            *("CountsAll", "FollowsLength", "KeepsLists"),
        )
    },
}
#: Families to try optimizers on: for each technique, and to stop and resume.
FOR_OPTIMIZERS, FOR_RESUMING = "llama, a loss function", "blocks with a plan"


def row_of(cell: Cell) -> dict[str, Any]:
    """What the table says of a cell before it is run."""
    of = find(cell.recipe.family)
    group, label = "family", cell.recipe.family
    if cell.after:
        group, label = "resume", f"{cell.after.technique}, then {cell.strategy.technique}"
    if cell.recipe.optimizer != Recipe("").optimizer:
        group, label = "optimizer", cell.recipe.optimizer + ", resumed" * bool(cell.after)
    return {
        "cell": cell.name,
        "group": group,
        "label": label,
        "kind": of.kind,
        "family": of.name,
        "technique": cell.strategy.technique,
        "devices": cell.strategy.devices,
    }


def recipe(family: str, strategy: Strategy | None = None, **changes: Any) -> Recipe:
    """How a family is trained, in parts where that changes its maths."""
    of = find(family)
    accumulate = strategy.accumulate if strategy and of.couples else 1
    return Recipe(family, **{**of.recipe, "accumulate": accumulate, **changes})


def by_family() -> list[Cell]:
    """Every family under every technique."""
    cells = []
    for number, name in enumerate(families()):
        turns = [IN_TURNS[(TURNS * number + turn) % len(IN_TURNS)] for turn in range(TURNS)]
        cells += [Cell(recipe(name, strategy), strategy) for strategy in (*ALWAYS, *turns)]
    return cells


def by_optimizer() -> list[Cell]:
    """Every optimizer under one strategy of each technique, and stopped and resumed under another."""
    cells = []
    for name, settings in OPTIMIZERS.items():
        changes = {"optimizer": name, "optimizer_args": {}, **settings}
        cells += [Cell(recipe(FOR_OPTIMIZERS, **changes), strategy) for strategy in PLAIN]
        resumed = recipe(FOR_RESUMING, **changes)
        cells += [Cell(resumed, strategy, _drawn(PLAIN, f"{name}, {strategy}")) for strategy in PLAIN]
    sparse = recipe("bag of words, sparse", optimizer="torch.optim:SparseAdam", lr=0.05)
    return [*cells, *(Cell(sparse, strategy) for strategy in PLAIN)]


def by_pair() -> list[Cell]:
    """Every ordered pair of strategies, each with a family that chance takes."""
    names = sorted(name for name, family in families().items() if not family.random)
    cells = []
    for before in STRATEGIES:
        for after in STRATEGIES:
            if before.accumulate == after.accumulate == 1:
                cells.append(Cell(recipe(_drawn(names, f"{before}, {after}")), after, before))
    return cells


def by_data() -> list[Cell]:
    """Families of data that remember, resumed in their second epoch."""
    remembering = [name for name, family in families().items() if family.kind in _REMEMBERING]
    pairs = (PLAIN[0], PLAIN[0]), (PLAIN[1], PLAIN[2]), (PLAIN[5], PLAIN[1])
    return [Cell(recipe(name), after, before) for name in remembering for before, after in pairs]


def _drawn(choices: Sequence[Choice], place: str) -> Choice:
    """One of ``choices``, for this place alone: with one more choice, few places get another."""
    return max(choices, key=lambda choice: hashlib.sha1(f"{place}: {choice}".encode()).hexdigest())


def all_cells() -> list[Cell]:
    """The whole matrix."""
    cells = [*by_family(), *by_optimizer(), *by_data(), *by_pair()]
    return list({cell.name: cell for cell in cells}.values())


def first_steps(cell: Cell) -> Cell:
    """What a resumed cell begins with."""
    assert cell.after
    return replace(cell, strategy=cell.after, after=None)


def truths(cells: Iterable[Cell]) -> list[Recipe]:
    """The recipes that plain loops have to train, each once."""
    recipes = [recipe for cell in cells for recipe in _recipes(cell)]
    return list({recipe.key: recipe for recipe in recipes}.values())


def references(cells: Iterable[Cell]) -> list[Cell]:
    """What ``single`` does where a plain loop can't know what is drawn, to compare the others with."""
    chosen = [cell for cell in cells if find(cell.recipe.family).random]
    found = {
        _drawn_key(cell): Cell(cell.recipe, Strategy("single", accumulate=cell.strategy.accumulate))
        for cell in chosen
    }
    return list(found.values())


def reference_keys(cell: Cell) -> list[str]:
    """The names of the files that the cell is compared with; it has to agree with one of them."""
    return [recipe.key for recipe in _recipes(cell)] or [_drawn_key(cell)]


def _drawn_key(cell: Cell) -> str:
    return f"{cell.recipe.key}-{cell.strategy.accumulate}"


def _recipes(cell: Cell) -> list[Recipe]:
    """What plain loops train: the parts, and the whole batch, which may be put together from its parts."""
    if find(cell.recipe.family).random:
        return []
    whole = replace(cell.recipe, accumulate=1)
    return [cell.recipe] if cell.recipe == whole else [cell.recipe, whole]
