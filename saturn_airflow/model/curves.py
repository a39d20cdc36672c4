"""Curves of a bounded length, however long training takes. Plain data."""

from __future__ import annotations

import math


class Curve:
    """Values by step, kept as means over equally many values each: twice as many when there is no more room.

    :param most: points that are kept, at the most; even.
    """

    def __init__(self, most: int = 48) -> None:
        self.most = most
        self.last_step = -1
        self._width = 1
        #: The last step of each part, the sum of its values, and how many they are.
        self._parts: list[tuple[int, float, int]] = []

    def add(self, step: int, value: object) -> None:
        """Take up a value; of a step that was there before, and what is no number, nothing."""
        if step <= self.last_step or isinstance(value, bool) or not isinstance(value, int | float):
            return
        self.last_step = step
        if not math.isfinite(value):
            return
        if self._parts and self._parts[-1][2] < self._width:
            _, total, count = self._parts[-1]
            self._parts[-1] = (step, total + value, count + 1)
        else:
            self._parts.append((step, float(value), 1))
        if len(self._parts) > self.most:
            self._width *= 2
            pairs = [self._parts[i : i + 2] for i in range(0, len(self._parts), 2)]
            self._parts = [(p[-1][0], sum(s for _, s, _ in p), sum(n for _, _, n in p)) for p in pairs]

    def forget(self, after: int) -> None:
        """Forget the values of later steps than this, which are trained otherwise now; those that were put
        together with such go, too."""
        self.last_step = min(self.last_step, after)
        self._parts = [part for part in self._parts if part[0] <= after]

    def points(self) -> list[list[float]]:
        """``[step, mean]`` of each part, with five significant digits."""
        return [[step, float(f"{total / count:.5g}")] for step, total, count in self._parts]
