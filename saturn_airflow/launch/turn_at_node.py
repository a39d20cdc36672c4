"""Whose turn it is at a node's devices: by the plan while one sweep is alone there, else together.

Every waiter decides by itself, inside the gate of the folder of leases, from the tickets and the files of the
devices: all see the same, and so all decide the same. There is nobody to fail.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from saturn_airflow.launch.holders import Holder
from saturn_airflow.launch.lease_folder import Ticket
from saturn_airflow.launch.rest_of_sweep import RestOfSweep
from saturn_airflow.model.claims import Claim
from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import SharingRules
from saturn_airflow.sharing import at_a_node
from saturn_airflow.sharing.line import Waiting, in_line


@dataclass(frozen=True)
class Sharing:
    """What a job of a sweep, or a trial, needs to take turns with the jobs of others.

    :param claim: what they are told.
    :param node: the names of the node's devices, by number.
    :param rest: what its sweep needs besides; None where that stays as the claim says.
    """

    claim: Claim
    node: tuple[str, ...]
    rules: SharingRules = field(default_factory=SharingRules)
    rest: RestOfSweep | None = None


class DevicesToTake(NamedTuple):
    """What a waiter finds.

    :param devices: that it may take now; none while it must wait.
    :param place: under what it runs on them, where that is not as it was planned.
    :param before: who stands before it in line.
    """

    devices: tuple[str, ...]
    place: Place | None
    before: list[Ticket]


def next_devices(
    ticket: Ticket,
    tickets: Iterable[Ticket],
    held: Mapping[str, Holder],
    sharing: Sharing | None,
    used: Mapping[str, float] | None = None,
) -> DevicesToTake:
    """The devices that ``ticket`` may take now.

    :param tickets: of all who wait.
    :param held: by device, who holds it.
    :param sharing: None for who has no claim.
    :param used: by team, what it used of the node's devices before.
    """
    now, mine = time.time(), ticket.holder.claim
    here = _Here.of(ticket.wanted if sharing is None else sharing.node, [ticket, *tickets], held)
    rules = SharingRules() if sharing is None else sharing.rules
    line = here.line(now, rules, used)
    before = line[: line.index(ticket)]
    if mine is None or sharing is None or at_a_node.plan_stands([*here.holding, *here.waiting]):
        return DevicesToTake(granted(ticket, before, set(held)), None, before)
    if mine.by_plan and not mine.sweep.trials:
        mine = replace(mine, by_plan=False)
        ticket.tell(replace(ticket.holder, claim=mine))
    busy, devices = here.busy(line), len(sharing.node)
    decision = at_a_node.decision_at_a_node(here.waiting, here.holding, busy, devices, now, rules, used)
    place = at_a_node.place_in(decision, mine)
    names = () if place is None else tuple(sharing.node[device] for device in place.device_ids)
    return DevicesToTake(names, place, before)


def is_to_leave(
    mine: Claim,
    sharing: Sharing,
    tickets: Iterable[Ticket],
    held: Mapping[str, Holder],
    used: Mapping[str, float] | None = None,
) -> bool:
    """Whether the job of ``mine``, which runs, is to write its checkpoint and let others have its devices."""
    now, here = time.time(), _Here.of(sharing.node, tickets, held)
    stands = at_a_node.plan_stands([*here.holding, *here.waiting])
    # A plan that stands says itself when its own jobs have their turns.
    waiting = [claim for claim in here.waiting if claim.sweep.trials or not stands]
    if not waiting:
        return False
    busy, devices = here.busy(here.line(now, sharing.rules, used)), len(sharing.node)
    decision = at_a_node.decision_at_a_node(waiting, here.holding, busy, devices, now, sharing.rules, used)
    if stands:
        return at_a_node.is_stopped_by_trial(decision, mine, waiting)
    return at_a_node.is_stopped_by(decision, mine)


class _Here(NamedTuple):
    """What concerns the devices of one node: several nodes of one machine share a folder.

    :param holding: the claims of those who hold devices, each once.
    """

    node: tuple[str, ...]
    tickets: list[Ticket]
    held: dict[str, Holder]
    holding: list[Claim]

    @classmethod
    def of(cls, node: Sequence[str], tickets: Iterable[Ticket], held: Mapping[str, Holder]) -> _Here:
        """:param tickets: of two of the same name the first counts."""
        names = set(node)
        wanting = {ticket.order: ticket for ticket in reversed(list(tickets)) if names & set(ticket.wanted)}
        held_here = {name: holder for name, holder in held.items() if name in names}
        holding = {h.claim.key: h.claim for h in held_here.values() if h.claim is not None}
        return cls(tuple(node), list(wanting.values()), held_here, list(holding.values()))

    @property
    def waiting(self) -> list[Claim]:
        """The claims of those who wait."""
        return [other.holder.claim for other in self.tickets if other.holder.claim is not None]

    def line(self, now: float, rules: SharingRules, used: Mapping[str, float] | None) -> list[Ticket]:
        """Those who wait, first in line first."""
        devices = len(self.node)
        ranks = at_a_node.ranks_at_a_node(self.waiting, self.holding, devices, now, rules, used)
        by_order = {ticket.order: ticket for ticket in self.tickets}
        waiting = [Waiting(ticket.order, ticket.holder.claim) for ticket in self.tickets]
        return [by_order[one.order] for one in in_line(waiting, ranks)]

    def busy(self, line: Iterable[Ticket]) -> list[int]:
        """Devices that are held by who has no claim, or kept for who has none and stands first."""
        first = itertools.takewhile(lambda other: other.holder.claim is None, line)
        claimed = {name for name, holder in self.held.items() if holder.claim is not None}
        kept = _kept(first, set(self.held)) - claimed
        return [number for number, name in enumerate(self.node) if name in kept]


def claims_at(node: Sequence[str], tickets: Iterable[Ticket], held: Mapping[str, Holder]) -> list[Claim]:
    """The claims of all who want devices of ``node`` or have some."""
    here = _Here.of(node, tickets, held)
    return [*here.holding, *here.waiting]


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
