"""How far an earlier estimate was off. Plain data."""

from __future__ import annotations

from typing import NamedTuple


class PastError(NamedTuple):
    """A job's error.

    :param sweep: what jobs whose errors have something in common share.
    :param factor: actual over estimated seconds on its devices, from launch to end.
    :param node: where it ran.
    :param gap: seconds from when its devices were free for it until it had them.
    """

    sweep: str
    job: str
    factor: float
    node: str = ""
    gap: float = 0.0
