"""A job's own metrics, computed from the outputs of its model over the evaluation data.

Functions give a number for each batch, from which sums and counts are kept; objects such as those of
torchmetrics keep what they want to. Whoever evaluates decides which batches or parts a rank shows to them.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from saturn_airflow.launch.users_code import of_the_job
from saturn_airflow.model import references
from saturn_airflow.model.errors import JobError
from saturn_airflow.model.metrics import PART
from saturn_airflow.training.losses import means
from saturn_airflow.training.nested import map_tensors
from saturn_airflow.training.ranks import Ranks

_FUNCTION = (
    "return the mean over the samples of the batch as a number, a pair (sum, count), or a mapping of those"
)


class Metrics:
    """A job's metrics, and what this rank has seen of the evaluation data.

    :param references_of: the job's ``metrics``.
    :param shares: in how many shares the ranks see the data, and
    :param share: the one of this rank.
    :raises JobError: when what a job names is no metric.
    """

    def __init__(self, references_of: Mapping[str, Any], ranks: Ranks, share: int, shares: int) -> None:
        self._ranks, self._share, self._shares = ranks, share, shares
        self.functions: dict[str, _Function] = {}
        self._objects: dict[str, _Object] = {}
        for name, reference in references_of.items():
            what = f"metric {name!r} ({reference})"
            with of_the_job(what):
                found = references.load(str(reference))
                made = _object_of(found)
            if made is not None:
                self._objects[name] = _Object(name, what, made, ranks.device)
            elif callable(found):
                self.functions[name] = _Function(name, what, found, ranks.device)
            else:
                raise JobError(
                    f"{what} is of type {type(found).__name__}; {_FUNCTION[7:]} comes from a function"
                )
        self._waiting: list[Any] = []

    @property
    def all_are_functions(self) -> bool:
        """Whether none of them must see the batches one after the other, in one place."""
        return not self._objects

    def begin(self) -> None:
        """Begin with a pass over the data."""
        self._waiting = []
        for function in self.functions.values():
            function.reset()
        for metric in self._objects.values():
            metric.reset()

    def see(self, outputs: Any, batch: Any, samples: int) -> None:
        """Look at what the model returned for a batch, or a part of one, of ``samples``."""
        means.set_listener(None)  # means that are computed here are not the loss's
        for function in self.functions.values():
            function.see(outputs, batch, samples)
        if self._objects:
            self._waiting.append(_as_torchmetrics_wants(outputs, batch))

    def end_round(self) -> None:
        """Show the objects what the ranks have seen since, in the order of their shares; all call this."""
        if not self._objects:
            return
        seen, self._waiting = self._waiting, []
        if self._shares > 1:
            here = (self._share, map_tensors(lambda tensor: tensor.detach().cpu(), seen))
            everyones: list[Any] | None = [None] * self._ranks.size if self._ranks.is_first else None
            dist.gather_object(here, everyones)
            by_share = _first_that_saw(everyones or [])
            seen = [pair for share in sorted(by_share) for pair in by_share[share]]
            seen = map_tensors(lambda tensor: tensor.to(self._ranks.device), seen)
        for pair in seen:
            for metric in self._objects.values():
                metric.see(*pair)

    def values(self) -> dict[str, float]:
        """The metrics over all that the ranks have seen; every rank calls this together."""
        sums = [sum_ for function in self.functions.values() for sum_ in function.sums()]
        computed = {k: v for metric in self._objects.values() for k, v in metric.values().items()}
        if self._ranks.size == 1:
            return {**_means([sums]), **computed}
        everyones = self._ranks.everyones((self._share, sums, computed))
        by_share = _first_that_saw([(share, sums) for share, sums, _ in everyones])
        found: dict[str, float] = next((values for _, _, values in everyones if values), {})
        return {**_means([by_share[share] for share in sorted(by_share)]), **found}

    def pairs(self, failed: bool) -> dict[str, tuple[float, float]] | None:
        """The sums and counts of what all ranks have seen together; None where those were not returned.

        Every rank calls this together.

        :param failed: whether a function failed on this rank.
        """
        sums = [sum_ for function in self.functions.values() for sum_ in function.sums()]
        here = (sums, not failed and all(function.only_pairs for function in self.functions.values()))
        everyones = self._ranks.everyones(here)
        if not all(only_pairs for _, only_pairs in everyones):
            return None
        seen: list[Sum] = next((sums for sums, _ in everyones if sums), [])
        return {name: (total, count) for name, total, count in seen}


Sum = tuple[str, float, float]


def _first_that_saw(seen: list[tuple[int, list[Any]]]) -> dict[int, list[Any]]:
    """What was seen of each share: ranks that compute one together see the same of it, or nothing."""
    found: dict[int, list[Any]] = {}
    for share, what in seen:
        if what:
            found.setdefault(share, what)
    return found


def _means(by_share: list[list[Sum]]) -> dict[str, float]:
    totals: dict[str, list[tuple[float, float]]] = {}
    for sums in by_share:
        for name, total, count in sums:
            totals.setdefault(name, []).append((total, count))
    means = {}
    for name, parts in totals.items():
        total, count = (math.fsum(values) for values in zip(*parts, strict=True))
        means[name] = total / count if count else math.nan
    return means


class _Function:
    """A function of the outputs and the targets.

    :ivar only_pairs: whether it has returned nothing but pairs, so that parts of a batch add up to it.
    """

    def __init__(self, name: str, what: str, function: Callable[..., Any], device: torch.device) -> None:
        self._name, self._what, self._function, self._device = name, what, function, device
        self._sums: dict[str, torch.Tensor] = {}
        self.only_pairs = True

    def reset(self) -> None:
        """Forget what was seen."""
        self._sums = {}

    def see(self, outputs: Any, batch: Any, samples: int) -> None:
        """Call it on a batch, or a part of one, of ``samples``."""
        targets = batch[1] if isinstance(batch, list | tuple) else batch
        with of_the_job(self._what):
            returned = self._function(outputs, targets)
        for key, value in _named(self._name, returned):
            pair = isinstance(value, list | tuple) and len(value) == 2
            self.only_pairs = self.only_pairs and pair
            numbers = [_number(part, self._what, _FUNCTION) for part in (value if pair else [value])]
            both = torch.stack([number.to(self._device) for number in numbers])
            if not pair:
                both = torch.stack([both[0] * samples, torch.full_like(both[0], samples)])
            self._sums[key] = self._sums[key] + both if key in self._sums else both

    def sums(self) -> list[Sum]:
        """Totals and counts by name, as numbers."""
        return [(key, *both.tolist()) for key, both in self._sums.items()]


class _Object:
    """An object like those of torchmetrics: ``update(predictions, targets)``, ``compute``, ``reset``."""

    def __init__(self, name: str, what: str, metric: Any, device: torch.device) -> None:
        self._name, self._what, self._metric = name, what, metric
        self._seen = False
        with of_the_job(what):
            if isinstance(metric, torch.nn.Module):
                metric.to(device)
                for module in metric.modules():
                    # It is shown everything in one place, so it has nobody to exchange its state with.
                    if hasattr(module, "distributed_available_fn"):
                        setattr(module, "distributed_available_fn", _nobody)  # noqa: B010
            self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self._seen = False
        with of_the_job(self._what):
            self._metric.reset()

    def see(self, predictions: Any, targets: Any) -> None:
        """Show it a batch."""
        self._seen = True
        with of_the_job(f"{self._what}: update"):
            self._metric.update(predictions, targets)

    def values(self) -> dict[str, float]:
        """What it has come to; nothing where it has seen nothing."""
        if not self._seen:
            return {}
        with of_the_job(f"{self._what}: compute"):
            computed = self._metric.compute()
        hint = "let compute return a number, or a mapping of numbers"
        return {key: float(_number(v, self._what, hint)) for key, v in _named(self._name, computed)}


def _object_of(found: Any) -> Any | None:
    """A metric object of its own, where ``found`` is one, its class, or a function that makes one."""
    if _is_object(found):
        return copy.deepcopy(found)
    if inspect.isclass(found) or (callable(found) and not _parameters(found)):
        made = found()
        if not _is_object(made):
            raise TypeError(f"it made a {type(made).__name__}, which has no update, compute and reset")
        return made
    return None


def _is_object(value: Any) -> bool:
    methods = (getattr(value, name, None) for name in ("update", "compute", "reset"))
    return not inspect.isclass(value) and all(map(callable, methods))


def _parameters(function: Any) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return 2


def _as_torchmetrics_wants(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Predictions and targets: of Hugging Face's outputs the logits, and of their batches the labels."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(batch, list | tuple):
        targets = batch[1]
    else:
        targets = batch.get("labels", batch) if isinstance(batch, Mapping) else batch
    return (outputs if logits is None else logits), targets


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield f"{name}{PART}{key}", part


def _number(value: Any, what: str, hint: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and not value.ndim and not value.is_complex():
        return value.detach().to(torch.float64)
    if not isinstance(value, torch.Tensor) and hasattr(value, "__float__") and not getattr(value, "ndim", 0):
        return torch.tensor(float(value), dtype=torch.float64)
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise JobError(f"{what} returned a {type(value).__name__}{shape}; {hint}")


def _nobody() -> bool:
    return False
