"""What differs between two takes of the same training step, beyond what their number format makes differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch

from saturn_airflow.training.guarding.plain import Step
from saturn_airflow.training.guarding.samples import Sample, Samples


class Tolerance(NamedTuple):
    """How far two takes may be apart, as shares.

    :param loss: of a step's loss; the second step's may be ten times as far off.
    :param gradient: of a parameter's gradient, in the L2 norm.
    :param floor: of the whole gradient; what a single parameter's may be off besides.
    :param update: of what a step changes a parameter by.
    """

    loss: float
    gradient: float
    floor: float
    update: float


#: By the lowest format that anything is computed in. Sums in another order differ by a few units in the last
#: place (float64 2e-16, float32 1e-7, bfloat16 8e-3, float16 1e-3) times the root of how many are added up,
#: and gradients by what cancels in them besides.
TOLERANCES = {
    torch.float64: Tolerance(1e-10, 1e-8, 1e-10, 1e-5),
    torch.float32: Tolerance(2e-5, 1e-3, 2e-6, 2e-2),
    torch.float16: Tolerance(5e-3, 5e-2, 1e-3, 2e-1),
    torch.bfloat16: Tolerance(2e-2, 1e-1, 5e-3, 5e-1),
}


# Of what a step changes, where the optimizer computes in a 16-bit format on exact gradients.
_ROUNDED_UPDATE = 5e-2
#: What keys of counters begin with; those of buffers are names of Python's.
COUNTER = "attribute "
# Steps in all of which a number must grow to be a counter.
_STEPS_OF_COUNTERS = 3
# As a share, how far counts that are no whole numbers may be apart, as in float32; and how many of something
# the samples of a compared step may have.
_SAME, _MOST_COUNTED = 1e-6, 64


@dataclass(frozen=True)
class Difference:
    """Something that is not as on one device.

    :param what: in words, such as ``the gradient of 'head.weight' in step 1``.
    :param how: by how much.
    :param order: what to tell first: the least.
    :param size: by how much, as a number in the unit of what differs, such as the L2 norm of what a gradient
        is off by; infinite where something is missing, or is no number.
    """

    what: str
    how: str
    order: int
    size: float = field(default=math.inf, compare=False)

    def __post_init__(self) -> None:
        if math.isnan(self.size):
            object.__setattr__(self, "size", math.inf)

    def __str__(self) -> str:
        return f"{self.what} {self.how}"


class Comparison:
    """The steps of one technique, as far as this rank holds them, beside those of the plain loop.

    Where the optimizer computes in a lower format than the model, its steps are only as exact as that, and
    what comes after them is as if computed in float32 at best.

    :param slack: how many times as far off as the tolerances say the first step may be.
    """

    def __init__(self, number_format: torch.dtype, slack: float = 1.0) -> None:
        self._first_slack = slack
        self._number_format = number_format
        self._least_update = 0.0
        self._steps = 0
        self._firm: dict[str, torch.Tensor] = {}
        self._counts: dict[str, list[float]] = {}

    def of(self, expected: Step, got: Step) -> list[Difference]:
        """What differs in the next step; ``got`` holds what this rank has."""
        self._steps += 1
        before = [*self._losses(expected, got), *self._gradients(expected, got)]
        self._note(expected.update_format)
        return [*before, *self._updates(expected, got)]

    def whole(self, expected: Step, got: Step) -> list[Difference]:
        """What differs in the next step where ``got`` holds everything."""
        found = self.of(expected, got)
        return found + [d for d in self.buffers(expected, got).values() if d is not None]

    def _note(self, update_format: torch.dtype) -> None:
        """The optimizer stepped in this format."""
        rank = list(TOLERANCES).index
        if update_format in TOLERANCES and rank(update_format) > rank(self._number_format):
            self._number_format = max(self._number_format, torch.float32, key=rank)
            if update_format != torch.float32:
                self._least_update = _ROUNDED_UPDATE

    @property
    def _tolerance(self) -> Tolerance:
        tolerance = TOLERANCES[self._number_format]
        return tolerance._replace(update=max(tolerance.update, self._least_update))

    def buffers(self, expected: Step, got: Step) -> dict[str, Difference | None]:
        """Of each buffer, and of each counter among attributes, that this rank holds, how it differs."""
        found = self._counters(expected, got)
        for name, buffer in got.buffers.items():
            as_it_should = expected.buffers.get(name)
            if as_it_should is None or buffer is None or buffer.values.shape != as_it_should.values.shape:
                continue
            off, norm = as_it_should.distance(buffer), as_it_should.norm
            allowed = self._tolerance.gradient * norm + self._tolerance.floor * math.sqrt(buffer.count)
            how = f"is off by {_share(off, norm)}"
            if as_it_should.exact:
                allowed, how = 0.0, "has other numbers"
                if buffer.count == 1:
                    how = f"is {as_it_should.values.item():g} on one device and {buffer.values.item():g} here"
            # The optimizer may make much of noise, which is not yet in the first step's buffers; in which of
            # the later ones it shows is chance.
            when = "step 1" if self._steps == 1 else "later steps"
            what = f"the buffer {name!r} after {when}"
            found[name] = None if off <= allowed else Difference(what, how, 3, off)
        return found

    def _counters(self, expected: Step, got: Step) -> dict[str, Difference | None]:
        """Counters are numbers that grow in every step: others may be notes of a batch."""
        found: dict[str, Difference | None] = {}
        for name, count in expected.counts.items():
            counts = self._counts.setdefault(name, [])
            counts.append(count)
            grows = all(one < other for one, other in itertools.pairwise(counts))
            if len(counts) < _STEPS_OF_COUNTERS or not grows or name not in got.counts:
                continue
            whole = isinstance(count, int)
            if whole or _counts(counts):
                off = abs(got.counts[name] - count)
                how = f"is {count} on one device and {got.counts[name]} here"
                wrong = Difference(f"the attribute {name!r}", how, 3, off)
                same = off == 0 if whole else off <= _SAME * abs(count)
                found[f"{COUNTER}{name}"] = None if same else wrong
        return found

    def evaluations(self, expected: float, got: float) -> list[Difference]:
        """How the loss of an evaluation after the last step differs, if it does."""
        return list(self._off("the loss of an evaluation", expected, got))

    def _off(self, what: str, expected: float, got: float) -> Iterator[Difference]:
        # A loss near 0 may be what is left of much larger numbers.
        allowed = self._tolerance.loss * self._slack * max(abs(expected), 1e-2)
        off = abs(got - expected)
        if not off <= allowed:
            share = f" ({_share(off, abs(expected))} off)"
            yield Difference(what, f"is {expected:.6g} on one device and {got:.6g} here{share}", 0, off)

    def _losses(self, expected: Step, got: Step) -> Iterator[Difference]:
        yield from self._off(f"the loss of step {self._steps}", expected.loss, got.loss)
        one, here = expected.counted, got.counted
        if one is None or here is None or one == here:
            return
        # Sums of weights are rounded, numbers of things are not.
        if one.is_integer() or abs(one - here) > self._tolerance.loss * self._slack * abs(one):
            what, how = f"what the loss of step {self._steps} is taken over", f"{one:g} on one device"
            yield Difference(what, f"is {how} and {here:g} here", 1, abs(here - one))

    def _gradients(self, expected: Step, got: Step) -> Iterator[Difference]:
        yield from self._of_each(expected, got, expected.unclipped, got.unclipped, " before it is clipped")
        yield from self._of_each(expected, got, expected.gradients, got.gradients)
        whole = _norm(expected.gradients)
        for name, gradient in got.gradients.items():
            as_it_should = expected.gradients.get(name)
            if as_it_should is None or gradient is None or not _are_alike(as_it_should, gradient):
                continue
            # Where a gradient is noise an optimizer may turn it into a step of full length. The noise is a
            # norm: an element's part of it is that over the root of their number.
            noise = self._noise(as_it_should, whole) / math.sqrt(max(as_it_should.count, 1))
            single = as_it_should.values[: as_it_should.singles].abs()
            nothing = (single == 0) & (gradient.values[: gradient.singles] == 0)
            firm = nothing | (single >= 10 * noise)
            self._firm[name] = firm & self._firm.get(name, firm)

    def _of_each(
        self, expected: Step, got: Step, wanted: Samples, found: Samples, when: str = ""
    ) -> Iterator[Difference]:
        """How ``found``, the gradients of ``got`` at some time, differ from those ``wanted``."""
        whole = _norm(wanted)
        for name, gradient in found.items():
            as_it_should = wanted.get(name)
            what = f"the gradient of {name!r}{when} in step {self._steps}"
            if as_it_should is None or gradient is None:
                there = gradient or as_it_should
                kept = name in (got if as_it_should is None else expected).stateful
                if there is not None and (there.norm > 0 or kept):
                    how = "is missing on one device and" if as_it_should is None else "is missing here and"
                    of_zeros = "of zeros" if there.norm == 0 else f"of norm {there.norm:.3g}"
                    here = "here" if as_it_should is None else "on one device"
                    yield Difference(what, f"{how} {of_zeros} {here}", 2)
            elif _are_alike(as_it_should, gradient):
                off = as_it_should.distance(gradient)
                if not off <= self._noise(as_it_should, whole) * self._slack:
                    yield Difference(what, f"is off by {_share(off, as_it_should.norm)}", 2, off)

    def _updates(self, expected: Step, got: Step) -> Iterator[Difference]:
        for name, after in got.weights.items():
            before, as_it_should = expected.before.get(name), expected.weights.get(name)
            if before is None or as_it_should is None or after.shape != as_it_should.shape:
                continue
            firm = self._firm.get(name, torch.ones_like(after, dtype=torch.bool))
            was, wanted, found = before[firm], as_it_should[firm], after[firm]
            update = float((wanted - was).norm())
            off = float((wanted - found).norm())
            # Weights are rounded to their format after the step, however short it is.
            allowed = self._tolerance.update * update + 4 * torch.finfo(self._number_format).eps * float(
                wanted.norm()
            )
            if not off <= allowed * self._slack:
                how = f"is off by {_share(off, update)} of what the step changes"
                yield Difference(f"{name!r} after step {self._steps}", how, 4, off)

    def _noise(self, gradient: Sample, whole: float) -> float:
        return self._tolerance.gradient * gradient.norm + self._tolerance.floor * whole

    @property
    def _slack(self) -> float:
        # Later steps begin at weights that are a little off already.
        return self._first_slack if self._steps == 1 else 10.0


def _counts(grown: Sequence[float]) -> bool:
    """Whether what has grown so far after each step, and is no whole number, grows by shares of counts.

    The first and the third step are on the same samples. What adds up losses, or seconds, grows otherwise.
    """
    first, second, third, *_ = grown
    steps = first, second - first, third - second
    if not math.isclose(steps[0], steps[2], rel_tol=_SAME):
        return False
    ratio = steps[1] / steps[0]
    return math.isclose(ratio, Fraction(ratio).limit_denominator(_MOST_COUNTED), rel_tol=_SAME)


def _norm(gradients: Samples) -> float:
    """The L2 norm of all of them together."""
    return math.sqrt(sum(gradient.norm**2 for gradient in gradients.values() if gradient is not None))


def _are_alike(one: Sample, other: Sample) -> bool:
    """Whether they can be compared: some parts of a tensor are such as only a technique knows."""
    return one.values.shape == other.values.shape


def _share(off: float, of: float) -> str:
    return f"{100 * off / of:.2g}%" if of and math.isfinite(off) else f"{off:.2g}"
