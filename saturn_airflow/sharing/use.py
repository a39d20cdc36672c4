"""What teams used of the devices, of late: what is long ago counts less and less."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: Seconds after which what was used counts half.
HALF_LIFE = 86400.0
#: Seconds after which it counts 1/e of itself.
_MEAN_LIFE = HALF_LIFE / math.log(2)


def decayed(used: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Device-seconds by team, so many seconds later."""
    left = math.exp(-max(0.0, seconds) / _MEAN_LIFE)
    return {team: value * left for team, value in used.items()}


def held(devices: int, seconds: float) -> float:
    """Device-seconds that count of devices that were held for so long, until now.

    The integral of the decay over that time: of its first second less counts than of its last.
    """
    return devices * _MEAN_LIFE * -math.expm1(-max(0.0, seconds) / _MEAN_LIFE)


def with_held(used: Mapping[str, float], team: str, devices: int, seconds: float) -> dict[str, float]:
    """``used``, and what ``team`` held until now."""
    return {**used, team: used.get(team, 0.0) + held(devices, seconds)}
