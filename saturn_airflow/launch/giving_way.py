"""A job's part in taking turns: under what it runs, how far it is, when it leaves its devices to others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from saturn_airflow.launch import past_runs, turn_at_node
from saturn_airflow.launch.failures import Failure
from saturn_airflow.launch.followed_run import all_of
from saturn_airflow.launch.kept_lease import GATE_SECONDS, LOOK_SECONDS, KeptLease, LeaseLostError
from saturn_airflow.launch.lease_folder import LeaseFolder
from saturn_airflow.launch.leases import Lease, default_folder
from saturn_airflow.launch.rest_of_sweep import RestOfSweep
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.launch.turn_at_node import Sharing
from saturn_airflow.model import guards
from saturn_airflow.model.claims import Claim
from saturn_airflow.model.entries import Strategy
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.model.refusals import RefusedStrategy
from saturn_airflow.model.sharing import Pace, seconds_to_leave
from saturn_airflow.model.status import Status
from saturn_airflow.sharing.at_a_node import as_seen, trained

#: What another strategy can train.
_REFUSED = frozenset({Status.CHANGES_RESULT, Status.DOES_NOT_FIT})


class GivingWay:
    """For a job that holds ``lease``.

    :param folder: of the node's leases; None for the default.
    """

    def __init__(self, sharing: Sharing, lease: Lease, folder: Path | None) -> None:
        assert lease.holder.claim is not None, "who takes turns has a claim"
        self._sharing, self._lease = sharing, lease
        self._folder = folder or default_folder()
        self._claim: Claim = lease.holder.claim
        self._had = 1 - self._claim.job.left
        self._total: int | None = None
        self._share = self._had
        self._began = self._looked_at = time.monotonic()
        self._step = 0.0
        self._first: tuple[float, float, int] | None = None
        self._told_at = 0.0
        self._is_among_others = False
        #: Whether the job was told to leave its devices.
        self.leaves = False

    def note(self, event: Mapping[str, Any]) -> None:
        """Look at what training says."""
        if event["event"] == "start":
            self._total, self._first = event.get("total_batches"), None
            self._note_step(event.get("step") or 0)
        elif event["event"] == "refused" and event.get("step") is not None:
            self._share = 0.0  # what was trained counts for nothing, and how much does is said at the start
        elif event["event"] == "step":
            self._note_step(event["step"])
            self._note_speed(event)
            self._step = event["seconds"]
        elif event["event"] == "checkpoint" and self._claim.job.stopped is None:
            # Not where it has left once: what that took counts for more.
            leaves_in = seconds_to_leave(event["seconds"], self._step)
            self._claim = self._claim.with_job(leaves_in=leaves_in)

    def asked(self) -> bool:
        """Whether to write a checkpoint and leave; once True, it stays so."""
        if self.leaves or time.monotonic() - self._looked_at < LOOK_SECONDS:
            return self.leaves
        self._looked_at = time.monotonic()
        # A folder that can't be used, a full disk, or whoever is held up in there must not end or hold up a
        # training that has its devices.
        with contextlib.suppress(SaturnError, OSError):
            self._look()
        return self.leaves

    def _look(self) -> None:
        """Tell those who wait how far the job is, and see whether it is to leave."""
        now = time.time()
        self._claim, rest = trained(self._claim, self._share, now), self._sharing.rest
        # This reads what its siblings wrote: a disk of theirs that does not answer would hold it up, too.
        if rest is not None and self._is_among_others:
            self._claim = rest.put_in(self._claim)
        lease_folder = LeaseFolder(self._folder)
        with lease_folder.gate(GATE_SECONDS):
            tickets = lease_folder.tickets()
            self._is_among_others = False
            if not any(ticket.holder.claim is not None for ticket in tickets):
                return
            held = lease_folder.holders()
            for device in self._lease.devices:
                held[device] = replace(self._lease.holder, claim=self._claim)
            claims = turn_at_node.claims_at(self._sharing.node, tickets, held)
            self._is_among_others = any(claim.sweep_here != self._claim.sweep_here for claim in claims)
            if rest is not None:
                rest.see(claims)
            self.leaves = self._claim.sweep.preempt and turn_at_node.is_to_leave(
                self._claim, self._sharing, tickets, held, lease_folder.used()
            )
            if self.leaves:
                self.leave()
            self._lease.tell(self._claim, lease_folder)

    def leave(self) -> None:
        """Have the job leave its devices."""
        self.leaves, self._told_at = True, time.monotonic()
        leaves_in = self._sharing.rules.seconds_to_leave(self._claim.job)
        self._claim = self._claim.with_job(leaving=time.time() + leaves_in)

    def expected_seconds(self) -> float:
        """What this stay at the devices was expected to take."""
        option, (seconds,) = self._claim.job.option, self._claim.job.option.seconds.values()
        return option.setup + max(0.0, self._share - self._had) * (seconds - option.setup)

    def count_use(self) -> None:
        """Count for its team what the job had, where teams have shares."""
        claim = self._claim
        if not claim.shares:
            return
        with contextlib.suppress(SaturnError, OSError):
            lease_folder = LeaseFolder(self._folder)
            with lease_folder.gate(GATE_SECONDS):
                had = time.monotonic() - self._began
                lease_folder.count_use(claim.sweep.team, len(self._lease.devices), had)

    def left_in(self) -> float:
        """Seconds since the job was told to leave."""
        return time.monotonic() - self._told_at

    def next_claim(self) -> Claim:
        """What others are told when the job has left and waits again."""
        left = as_seen(self._claim, self._sharing.rules).with_job(
            place=None, leaving=None, stopped=time.time(), setting_up=0.0, leaves_in=self.left_in()
        )
        return replace(left, by_plan=False, pace=None)

    def _note_speed(self, step: Mapping[str, Any]) -> None:
        """Note how fast the job trains here, from its first step here on."""
        if not self._total:
            return
        now, share, epoch = time.monotonic(), step["step"] / self._total, int(step.get("epoch") or 0)
        if self._first is None:
            self._first = now, share, epoch
            return
        began, had, first_epoch = self._first
        if share > had and now > began:
            pace = Pace(min(1.0, share - had), now - began, epoch > first_epoch)
            self._claim = replace(self._claim, pace=pace)

    def _note_step(self, step: int) -> None:
        if self._total:
            self._share = min(1.0, max(self._share, step / self._total))


def _sharing(spec: RunSpec, claim: Claim, node: tuple[str, ...]) -> Sharing:
    rest = RestOfSweep(spec.home, claim.sweep.name) if spec.home and not claim.sweep.trials else None
    return Sharing(claim, node, rest=rest)


class TurnsOfRun:
    """A run's turns at its node's devices, one after another: under what it runs in each.

    :param node: the names of the node's devices, by number.
    :param on_lost: called once in a turn where another run gets its devices, too, with that as a sentence.
    :ivar trains: whether the run trains a job.
    :ivar sharing: what it takes to take turns; None for what does not.
    :ivar spec: what the run does in this turn.
    """

    def __init__(
        self, spec: RunSpec, node: tuple[str, ...], on_lost: Callable[[str], object] = lambda told: None
    ) -> None:
        self.spec = spec
        self._on_lost = on_lost
        self.sharing = None if spec.claim is None else _sharing(spec, spec.claim, node)
        self._node = node
        self._is_trial, self.trains = spec.mode == "trial", spec.mode == "train"
        self._stay: GivingWay | None = None
        self._kept: KeptLease | None = None
        self._is_lost = False
        self._expected_seconds = 0.0
        self._is_as_planned = True
        self._refused = set[tuple[str, int]]()
        #: The last under this strategy.
        self._last_step: Mapping[str, Any] = {}
        #: Seconds that it took to leave the last turn, where it gave way.
        self.left_in: float | None = None
        #: The numbers of the devices it holds; its ranks run on the first ``spec.devices``, in this order.
        self.device_ids: tuple[int, ...] = ()
        if self.trains:
            self._leave_out(past_runs.refusals_of(all_of(spec.folder)))

    def begin(self, lease: Lease, folder: Path | None) -> dict[str, Any]:
        """Run on the devices of ``lease``; what is told of that."""
        ids = tuple(self._node.index(name) for name in lease.devices)
        place = None if self._is_trial else lease.place
        chosen = None if place is None else (place.technique, place.devices)
        # What others count with may have been refused since; what it goes on under instead may fit there.
        if chosen is not None and not (chosen in self._refused and self.spec.devices <= len(ids)):
            strategy = next(s for s in self.spec.strategies if (s.technique, s.devices) == chosen)
            self._is_as_planned = False
            self.spec = replace(
                self.spec,
                technique=strategy.technique,
                devices=strategy.devices,
                device_ids=ids,
                parameters=strategy.parameters,
                verdict=strategy.verdict,
                version=strategy.version,
            )
        elif not self._is_as_planned:
            self.spec = replace(self.spec, device_ids=ids[: self.spec.devices])
        self.device_ids = ids
        self._kept, self._is_lost = KeptLease(lease, folder), False
        if self.sharing is not None and not self._is_trial:
            self._stay = GivingWay(self.sharing, lease, folder)
        return self.under

    @property
    def under(self) -> dict[str, Any]:
        """What the run tells of under what it trains."""
        devices = list(self.device_ids[: self.spec.devices])
        names = [self._node[number] for number in devices]
        return {"names": names, "devices": devices, "technique": self.spec.technique}

    def goes_on_after(
        self, failure: Failure, tell: Callable[[dict[str, Any]], object], occupied: bool = False
    ) -> bool:
        """Take the fastest other strategy for the devices that it holds, where training found that the one
        it runs under can't train this job as one device does, or not at all; where its devices' memory ran
        out, the fastest of those that were seen to take less. Runs after this one know what is refused.

        :param tell: called with events that tell of it.
        :param occupied: whether others use the memory of its devices, too, which may suffice another time.
        :returns: whether it goes on; not where there is no other, or that is not what training found.
        """
        # Who is ended for the machine's memory has no traceback.
        out_of_memory = failure.status == Status.OUT_OF_MEMORY and bool(failure.traceback)
        if not self.trains or (not out_of_memory and failure.status not in _REFUSED):
            return False
        self._refused.add((self.spec.technique, self.spec.devices))
        refusal, other = self._refusal(failure), self._other(len(self.device_ids), less_memory=out_of_memory)
        if not out_of_memory or not occupied:
            tell({"event": "refused", **refusal.to_dict()})
        if other is None:
            return False
        self._go_on_under(other)
        message = (
            f"{refusal.what} ({refusal.why}): training goes on under {other.technique} x {other.devices}"
        )
        tell({"event": "warning", "message": message})
        tell({"event": "leased", **self.under})
        return True

    def _leave_out(self, refusals: Iterable[RefusedStrategy]) -> None:
        """Begin under another strategy where the memory ran out under the planned one in an earlier run: it
        would at the same batch, but by other code."""
        planned = self.spec
        out = [refusal for refusal in refusals if refusal.status == Status.OUT_OF_MEMORY]
        if out:
            own_code = guards.own_code(planned.job)
            out = [refusal for refusal in out if refusal.own_code in (None, own_code)]
        while any(
            (refusal.technique, refusal.devices) == (self.spec.technique, self.spec.devices)
            and dict(refusal.parameters) == dict(self.spec.parameters)
            for refusal in out
        ):
            self._refused.add((self.spec.technique, self.spec.devices))
            if (other := self._other(planned.devices, less_memory=True)) is None:
                self.spec, self._is_as_planned = planned, True
                self._refused.clear()
                return
            self._go_on_under(other)

    def _other(self, devices: int, *, less_memory: bool) -> Strategy | None:
        """The fastest other strategy for so many devices.

        :param less_memory: whether only those will do that were seen to take less than the present one.
        """
        spec = self.spec
        others = [
            s
            for s in spec.strategies
            if s.devices <= devices and (s.technique, s.devices) not in self._refused
        ]
        if less_memory:
            peaks = {(s.technique, s.devices): s.peak_device_bytes for s in spec.strategies}
            too_much = peaks.get((spec.technique, spec.devices), 0)
            others = [s for s in others if 0 < s.peak_device_bytes < too_much]
        return min(others, key=lambda s: s.seconds, default=None)

    def _go_on_under(self, other: Strategy) -> None:
        self._is_as_planned, self._last_step = False, {}
        ids = self.device_ids or self.spec.device_ids
        self.spec = replace(
            self.spec,
            technique=other.technique,
            devices=other.devices,
            device_ids=None if ids is None else tuple(ids[: other.devices]),
            parameters=other.parameters,
            verdict=other.verdict,
            version=other.version,
        )

    def _refusal(self, failure: Failure) -> RefusedStrategy:
        spec = self.spec
        under = spec.technique, spec.devices
        # What was trained until the memory ran out counts, but by other code it may not run out.
        ran_out = failure.status == Status.OUT_OF_MEMORY
        return RefusedStrategy(
            technique=spec.technique,
            devices=spec.devices,
            reason=failure.reason,
            status=failure.status,
            parameters=spec.parameters,
            version=next((s.version for s in spec.strategies if (s.technique, s.devices) == under), "1"),
            step=None if ran_out else self._last_step.get("step"),
            seconds=self._last_step.get("seconds"),
            own_code=guards.own_code(spec.job) if ran_out else None,
        )

    def note(self, event: Mapping[str, Any]) -> None:
        """Look at what training says."""
        if event["event"] == "step":
            self._last_step = event
        if self._stay is not None:
            self._stay.note(event)

    def is_to_leave(self) -> bool:
        """Whether to write a checkpoint and wait for another turn.

        :raises LeaseLostError: as :meth:`keep_devices`.
        """
        self.keep_devices()
        return self._is_lost or (self._stay is not None and self._stay.asked())

    def keep_devices(self, *, at_once: bool = False) -> None:
        """Look whether the run still has its devices for itself; where not, training leaves them.

        :param at_once: even if the last look was just now.
        :raises LeaseLostError: where not, and it does not train: what it measures beside another is wrong.
        """
        if not self._is_lost and self._kept is not None and (told := self._kept.lost(at_once=at_once)):
            self._is_lost = True
            self._on_lost(f"{told}. This run leaves its devices, and goes on when it has them for itself")
            if self._stay is not None:
                self._stay.leave()
        if self._is_lost and self.spec.mode != "train":
            raise LeaseLostError

    def is_over(self) -> None:
        """Count for its team what the job had in this turn, whatever came of it.

        :raises LeaseLostError: as :meth:`keep_devices`: another may have got its devices since the last look.
        """
        if self._stay is not None:
            self._stay.count_use()
        if self.spec.mode != "train":
            self.keep_devices(at_once=True)

    def ends(self) -> bool:
        """End this turn; whether there is to be another."""
        if self._stay is None or self.sharing is None:
            return self._is_lost
        stay, self._stay = self._stay, None
        self._expected_seconds += stay.expected_seconds()
        self.left_in = stay.left_in() if stay.leaves else None
        self.sharing = replace(self.sharing, claim=stay.next_claim())
        self._is_as_planned &= not stay.leaves
        return stay.leaves

    def result(self) -> dict[str, Any]:
        """Under what it ran last, where that was not as planned, and what all its turns were to take."""
        if self._is_as_planned:
            return {}
        spec, expected = self.spec, self._expected_seconds
        found = {"planned_seconds": expected} if expected else {}
        return {
            "technique": spec.technique,
            "devices": spec.devices,
            "device_ids": list(spec.device_ids or ()),
            "parameters": dict(spec.parameters),
            **found,
        }
