"""Whose turn it is at a node's devices: by the plan while one sweep is alone there, else together.

Every waiter decides by itself, inside the gate of the folder of leases, from the tickets and the files of the
devices: all see the same, and so all decide the same. There is nobody to fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from saturn_airflow.launch.lease_folder import Holder, Ticket
from saturn_airflow.model.claims import Claim
from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import SharingRules
from saturn_airflow.sharing import at_a_node


@dataclass(frozen=True)
class Sharing:
    """What a job of a sweep needs to take turns with the jobs of others.

    :param claim: what they are told.
    :param node: the names of the node's devices, by number.
    """

    claim: Claim
    node: tuple[str, ...]
    rules: SharingRules = field(default_factory=SharingRules)


def next_devices(
    ticket: Ticket,
    tickets: Sequence[Ticket],
    held: Mapping[str, Holder],
    sharing: Sharing | None,
    overtakes: bool = False,
    used: Mapping[str, float] | None = None,
) -> tuple[tuple[str, ...], Place | None]:
    """The devices that ``ticket`` may take now, none while it must wait; and, where that is not as it was
    planned, under what.

    :param tickets: of all who wait, first in the queue first.
    :param held: by device, who holds it.
    :param overtakes: it is over in no time, and need not wait for the jobs of sweeps that wait before it.
    :param used: by team, what it used of the node's devices before.
    """
    line = [other for other in tickets if other.order < ticket.order]
    mine = ticket.holder.claim
    here, held_here = ([], {}) if sharing is None else _of_node(sharing.node, tickets, held)
    if mine is None or sharing is None or at_a_node.plan_stands(_claims(here, held_here)):
        if overtakes:
            line = [other for other in line if other.holder.claim is None]
        return granted(ticket, line, set(held)), None
    if mine.by_plan:
        mine = replace(mine, by_plan=False)
        ticket.tell(replace(ticket.holder, claim=mine))
    waiting = [other.holder.claim for other in here if other.holder.claim is not None]
    busy, devices = _busy(line, held, sharing.node), len(sharing.node)
    decision = at_a_node.decision_at_a_node(
        waiting, _holding(held_here), busy, devices, time.time(), sharing.rules, used
    )
    place = at_a_node.place_in(decision, mine)
    return (() if place is None else tuple(sharing.node[device] for device in place.device_ids)), place


def is_to_leave(
    mine: Claim,
    sharing: Sharing,
    tickets: Iterable[Ticket],
    held: Mapping[str, Holder],
    used: Mapping[str, float] | None = None,
) -> bool:
    """Whether the job of ``mine``, which runs, is to write its checkpoint and let others have its devices."""
    tickets, held = _of_node(sharing.node, tickets, held)
    waiting = [other.holder.claim for other in tickets if other.holder.claim is not None]
    if not waiting or at_a_node.plan_stands(_claims(tickets, held)):
        return False
    busy, devices = _busy(tickets, held, sharing.node), len(sharing.node)
    decision = at_a_node.decision_at_a_node(
        waiting, _holding(held), busy, devices, time.time(), sharing.rules, used
    )
    return at_a_node.is_stopped_by(decision, mine)


def _of_node(
    node: Sequence[str], tickets: Iterable[Ticket], held: Mapping[str, Holder]
) -> tuple[list[Ticket], dict[str, Holder]]:
    """What concerns the devices of ``node``: several nodes of one machine share a folder."""
    names = set(node)
    wanting = [ticket for ticket in tickets if names.intersection(ticket.wanted)]
    return wanting, {name: holder for name, holder in held.items() if name in names}


def granted(ticket: Ticket, line: Iterable[Ticket], held: set[str]) -> tuple[str, ...]:
    """The devices that ``ticket`` may take with ``line`` before it; none if it must wait."""
    taken = _kept(line, held)
    mine = [device for device in ticket.wanted if device not in taken][: ticket.need]
    return tuple(mine) if len(mine) == ticket.need else ()


def _kept(line: Iterable[Ticket], held: set[str]) -> set[str]:
    """What is held, and what those in ``line`` keep of the rest."""
    taken = set(held)
    for other in line:
        # Who is before and can't go yet still keeps what is free, or a wide job would wait for ever.
        free = [device for device in other.wanted if device not in taken]
        taken.update(other.wanted if other.need == len(other.wanted) else free[: other.need])
    return taken


def _busy(line: Iterable[Ticket], held: Mapping[str, Holder], node: Sequence[str]) -> list[int]:
    """Devices that are held by, or kept for, what is no job of a sweep that says what it needs."""
    strangers = [other for other in line if other.holder.claim is None]
    claimed = {name for name, holder in held.items() if holder.claim is not None}
    kept = _kept(strangers, set(held)) - claimed
    return [number for number, name in enumerate(node) if name in kept]


def _holding(held: Mapping[str, Holder]) -> list[Claim]:
    """The claims of those who hold devices, each once."""
    found = {holder.claim.key: holder.claim for holder in held.values() if holder.claim is not None}
    return list(found.values())


def _claims(tickets: Iterable[Ticket], held: Mapping[str, Holder]) -> list[Claim]:
    """The claims of all who hold devices or wait for them."""
    waiting = [other.holder.claim for other in tickets if other.holder.claim is not None]
    return [*_holding(held), *waiting]
