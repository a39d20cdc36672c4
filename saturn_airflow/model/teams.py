"""Teams that share a deployment: what the configuration gives them, and what their DAGs may ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from saturn_airflow.model.arguments import hint
from saturn_airflow.model.errors import InvalidSweepError

#: In ``[saturn] priorities``, whoever is not named.
OTHERS = "*"


@dataclass(frozen=True)
class Teams:
    """What ``[saturn] shares`` and ``[saturn] priorities`` say.

    :param shares: by team, its share of the devices when others want them too; empty where none has one.
    :param priorities: by team, the highest ``priority=`` that its sweeps may have. For teams that it does not
        name, and sweeps of no team, :data:`OTHERS` counts; without that they may have any.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    priorities: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, shares: str, priorities: str) -> Teams:
        """From texts such as ``"vision: 0.5, text: 0.3"`` and ``"vision: 10, *: 0"``.

        :raises InvalidSweepError: when they can't be read, or the shares are more than all there is.
        """
        found = _numbers(shares, "[saturn] shares", "vision: 0.5, text: 0.3", lambda share: 0 < share <= 1)
        if sum(found.values()) > 1 + 1e-9:
            raise InvalidSweepError(f"[saturn] shares is {shares!r}; together they are at most 1")
        return cls(found, _numbers(priorities, "[saturn] priorities", "vision: 10, *: 0", math.isfinite))

    def check(self, team: str, priority: float) -> None:
        """Check what a DAG asks for.

        :raises InvalidSweepError: when the deployment does not let it have that.
        """
        named = {*self.shares, *self.priorities} - {OTHERS}
        if team and named and team not in named:
            raise InvalidSweepError(
                f"team is {team!r}, which neither [saturn] shares nor priorities name; "
                f"{hint(team, named, 'they name ' + ', '.join(sorted(named)))}"
            )
        most = self.priorities.get(team, self.priorities.get(OTHERS, math.inf))
        if priority > most:
            whose = f"team {team!r}" if team else "a sweep of no team"
            raise InvalidSweepError(
                f"priority is {priority:g}, and [saturn] priorities lets {whose} have {most:g} at the most"
            )


def _numbers(text: str, setting: str, example: str, may_be: Callable[[float], bool]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.rpartition(":")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        name = name.strip()
        if not name or not may_be(number):
            raise InvalidSweepError(f"{setting} is {text!r}; {part!r} is not as in {example!r}")
        if name in found:
            raise InvalidSweepError(f"{setting} is {text!r}; it names {name!r} twice")
        found[name] = number
    return found
