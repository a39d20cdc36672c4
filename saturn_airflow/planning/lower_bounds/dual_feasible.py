"""Dual feasible functions: what makes area bounds stronger than area.

u: [0, 1] -> [0, 1] is dual feasible when x_1 + ... + x_n <= 1 implies u(x_1) + ... + u(x_n) <= 1.
The jobs that run at one moment on a node of G devices have g_1/G + ... <= 1, so a moment never holds
more than 1 of u; the jobs that follow each other on one device within C seconds have r_1/C + ... <= 1,
so neither does a device hold more than 1 of v. Hence, for any pair (u, v),

    sum over the jobs on a node of u(g/G) v(r/C) <= 1.

Source: Fekete and Schepers, "A general framework for bounds for higher-dimensional orthogonal packing
problems" (2004); the families are surveyed by Clautiaux, Alves, Valério de Carvalho, "A survey of
dual-feasible and superadditive functions" (2010).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

Function = Callable[[float], float]

#: Values nearer than this are equal.
_ROUNDING = 1e-9
#: From so many different values on, so few thresholds are taken: each function is evaluated at each value.
_MANY_POINTS = 2000
_FEW_THRESHOLDS = 8


def identity(x: float) -> float:
    """u(x) = x: with it for both of a pair, the row is plain area."""
    return x


def staircase(k: int) -> Function:
    """u^(k)(x) = x where (k + 1) x is whole, otherwise floor((k + 1) x) / k; k = 1 cuts at 1/2."""

    def u(x: float) -> float:
        steps = (k + 1) * x
        if abs(steps - round(steps)) < _ROUNDING:
            return x
        return math.floor(steps) / k

    return u


def threshold(eps: float) -> Function:
    """U^eps(x) = 0 below eps, 1 above 1 - eps, x between, for eps <= 1/2."""

    def u(x: float) -> float:
        if x > 1 - eps + _ROUNDING:
            return 1.0
        return x if x >= eps - _ROUNDING else 0.0

    return u


def rounding(eps: float) -> Function:
    """phi^eps: x < 1/2 is rounded down to whole eps, the rest is what that leaves, for eps <= 1/2."""
    whole = math.floor(1 / eps + _ROUNDING)

    def u(x: float) -> float:
        if abs(x - 0.5) < _ROUNDING:
            return 0.5
        if x < 0.5:
            return math.floor(x / eps + _ROUNDING) / whole
        return 1 - math.floor((1 - x) / eps + _ROUNDING) / whole

    return u


def family(values: Iterable[float], thresholds: int = 24) -> list[Function]:
    """Functions worth trying on these values of [0, 1]: of those that agree on all of them, one.

    :param thresholds: how many eps to take, evenly from those at which something changes.
    """
    points = sorted({round(value, 12) for value in values})
    if len(points) > _MANY_POINTS:
        thresholds = min(thresholds, _FEW_THRESHOLDS)
    steps = sorted({min(x, 1 - x) for x in points if 0 < min(x, 1 - x) <= 0.5})
    if len(steps) > thresholds:
        steps = [steps[i * (len(steps) - 1) // (thresholds - 1)] for i in range(thresholds)]
    found: dict[tuple[float, ...], Function] = {}
    # The first stays the identity, since the first of those that agree is kept: callers count on it.
    candidates = [identity, *(staircase(k) for k in range(1, 8))]
    # Just above a value it no longer counts; at it, its complement does.
    for eps in steps:
        candidates += [threshold(eps), threshold(min(0.5, eps * (1 + 1e-7) + 1e-7)), rounding(eps)]
    for u in candidates:
        found.setdefault(tuple(round(u(x), 12) for x in points), u)
    return list(found.values())
