"""In which order all who wait at a node stand in line, the same for whoever looks.

Those with a claim (jobs of sweeps, and trials) stand in the order of their sweeps' turns. Who has none, such
as a job that an earlier version planned, came before or after each of them, and no more is known: it stands
behind all of them as long as any came before it, else before all. So there is one line, and nobody waits for
himself by way of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from saturn_airflow.model.claims import Claim
from saturn_airflow.sharing.ranking import Rank

Order = tuple[float, int, float, str]
"""When the plan was made that sent somebody, his place in it, since when he waits, the name of his ticket."""


class Waiting(NamedTuple):
    """Somebody who waits.

    :param order: no two have the same.
    """

    order: Order
    claim: Claim | None


def in_line(waiting: Iterable[Waiting], ranks: Mapping[str, Rank]) -> list[Waiting]:
    """All who wait at a node, the first in line first.

    :param ranks: the turns of the sweeps whose claims wait, by their names here.
    """
    waiting = list(waiting)
    claimed = [one.order for one in waiting if one.claim is not None]
    oldest = min(claimed, default=None)

    def place(one: Waiting) -> tuple[int, tuple[object, ...], Order]:
        if one.claim is not None:
            return 1, ranks[one.claim.sweep_here].key, one.order
        return 0 if oldest is None or one.order < oldest else 2, (), one.order

    return sorted(waiting, key=place)
