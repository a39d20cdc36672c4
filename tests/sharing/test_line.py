"""One line for all who wait at a node: jobs of sweeps, trials, and those of whom nothing is known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saturn_airflow.launch.holders import Holder
from saturn_airflow.launch.lease_folder import Ticket
from saturn_airflow.launch.turn_at_node import Sharing, is_to_leave, next_devices
from saturn_airflow.model.claims import HERE, Claim, claim_of, claim_of_trial
from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import SharedSweep, SharingRules
from saturn_airflow.sharing.at_a_node import plan_stands, ranks_at_a_node
from saturn_airflow.sharing.line import Waiting, in_line

NODE = ("d0", "d1", "d2", "d3")
PRIORITIES = {"a": 0.0, "b": 0.0, "c": 5.0}
RULES = SharingRules(checkpoint=1.0)
#: Of the sweeps, all of whose jobs tell the same.
ARRIVED = time.time()


def job_of(sweep: str, name: str, seconds: dict[tuple[str, int], tuple[float, float]], made: float) -> Claim:
    facts = SharedSweep(sweep, (), ARRIVED, 1e6, PRIORITIES[sweep], preempt=sweep == "b")
    return claim_of(facts, name, next(iter(seconds))[0], seconds, made)


def trial_of(name: str, devices: int, priority: float, made: float, waited: float = 0.0) -> Claim:
    facts = SharedSweep("new", (), time.time() - waited, 0.0, priority)
    return claim_of_trial(facts, name, "ddp", devices, made, {})


class Queue:
    """Who waits for the devices of a node, and who holds them."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[Ticket, Sharing | None]] = {}
        self.held: dict[str, Holder] = {}
        self.count = 0

    def join(self, claim: Claim | None, wanted: tuple[str, ...], need: int, made: float) -> str:
        self.count += 1
        who = f"{self.count:032x}"
        data = {"priority": [made, self.count], "wanted": list(wanted), "need": need}
        data["holder"] = Holder(who, 1, float(self.count), claim).to_dict()
        sharing = None if claim is None else Sharing(claim, NODE, RULES)
        self.waiting[who] = Ticket(who, data, os.memfd_create("ticket")), sharing
        return who

    def look(self, who: str) -> bool:
        """Whether it has its devices now."""
        ticket, sharing = self.waiting[who]
        found = next_devices(ticket, [other for other, _ in self.waiting.values()], self.held, sharing)
        if not found.devices:
            return False
        assert not set(found.devices) & set(self.held), "a device is shared"
        claim = ticket.holder.claim
        if claim is not None:
            ids = tuple(map(NODE.index, found.devices))
            claim = claim.with_job(place=found.place or Place(claim.technique, len(ids), HERE, ids))
        holder = Holder(who, 1, float(self.count), claim)
        self.held |= dict.fromkeys(found.devices, holder)
        self._leave(who)
        return True

    def all_look(self, order: list[str]) -> None:
        for who in order:
            self.look(who)

    def end(self, who: str) -> None:
        self.held = {device: holder for device, holder in self.held.items() if holder.who != who}

    def holders(self) -> list[Holder]:
        return list({holder.who: holder for holder in self.held.values()}.values())

    def give_way(self) -> None:
        """Let those leave that are to, and wait again."""
        tickets = [ticket for ticket, _ in self.waiting.values()]
        for holder in self.holders():
            mine = holder.claim
            if mine is None or not mine.sweep.preempt:
                continue
            if is_to_leave(mine, Sharing(mine, NODE, RULES), tickets, self.held):
                self.end(holder.who)
                left = mine.with_job(place=None, stopped=time.time(), leaving=None)
                self.join(type(left)(**{**vars(left), "by_plan": False}), NODE, 1, mine.made)

    def close(self) -> None:
        for who in list(self.waiting):
            self._leave(who)

    def _leave(self, who: str) -> None:
        file = self.waiting.pop(who)[0]._file
        assert file is not None
        os.close(file)


def add_any(queue: Queue, data: st.DataObject) -> str:
    """Somebody comes, of whatever kind."""
    name, made = f"w{queue.count}", data.draw(st.floats(0.0, 9.0))
    kind = data.draw(st.sampled_from(("job", "trial", "unknown")))
    width = data.draw(st.integers(1, 4))
    if kind == "trial":
        return queue.join(
            trial_of(name, width, data.draw(st.sampled_from((-5.0, 0.0, 9.0))), made), NODE, width, made
        )
    if kind == "unknown":
        wanted = data.draw(st.sampled_from((NODE, NODE[:width], NODE[-width:])))
        return queue.join(None, wanted, min(width, len(wanted)), made)
    widths = {width, *data.draw(st.sets(st.integers(1, 4), max_size=2))}
    seconds = {("t", w): (data.draw(st.floats(1.0, 1e5)) / w, 0.5) for w in sorted(widths)}
    sweep = data.draw(st.sampled_from(sorted(PRIORITIES)))
    # All jobs of a sweep are of one plan.
    made = float(ord(sweep) - ord("a"))
    return queue.join(job_of(sweep, name, seconds, made), NODE[:width], width, made)


@contextmanager
def mixed(data: st.DataObject, most: int) -> Iterator[Queue]:
    with closing(Queue()) as queue:
        for _ in range(data.draw(st.integers(1, most))):
            add_any(queue, data)
        yield queue


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_there_is_one_line_whoever_looks(data: st.DataObject) -> None:
    with mixed(data, 9) as queue:
        waiting = [Waiting(ticket.order, ticket.holder.claim) for ticket, _ in queue.waiting.values()]
    claims = [one.claim for one in waiting if one.claim is not None]
    ranks = ranks_at_a_node(claims, (), len(NODE), time.time(), RULES)
    line = in_line(waiting, ranks)
    assert sorted(line) == sorted(waiting), "all stand in it, once"
    assert in_line(data.draw(st.permutations(waiting)), ranks) == line
    for place, one in enumerate(line):
        for behind in line[place + 1 :]:
            if one.claim is None and behind.claim is None:
                assert one.order < behind.order, "who came first"
            elif one.claim is None:
                assert all(one.order < other.order for other in waiting if other.claim is not None)
            elif behind.claim is None:
                assert any(other.order < behind.order for other in waiting if other.claim is not None)
            else:
                first, second = one.claim.sweep, behind.claim.sweep
                assert first.priority >= second.priority
                if first.priority == second.priority:
                    assert first.trials >= second.trials, "trials overtake"


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_all_have_their_turn_and_none_beside_another_on_a_device(data: st.DataObject) -> None:
    with mixed(data, 8) as queue:
        arrivals = data.draw(st.integers(0, 3))
        for _ in range(200):
            order = data.draw(st.permutations(sorted(queue.waiting)))
            queue.all_look(order)
            if not queue.waiting:
                break
            assert queue.held, "all devices are free, and all wait for each other"
            queue.give_way()
            if arrivals:
                add_any(queue, data)
                arrivals -= 1
            if queue.held:
                queue.end(data.draw(st.sampled_from(sorted(holder.who for holder in queue.holders()))))
        assert not queue.waiting


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_trial_of_a_higher_priority_waits_but_for_those_that_have_devices(data: st.DataObject) -> None:
    """Others wait whose jobs take longer than what runs: those that are over before it could begin may go."""
    seconds = {("t", 1): (1000.0, 0.0)}
    width = data.draw(st.integers(1, 4))
    sweeps = data.draw(st.lists(st.sampled_from("ab"), min_size=8, max_size=12))
    with closing(Queue()) as queue:
        for number, sweep in enumerate(sweeps):
            device = (NODE[number % 4],)
            queue.join(job_of(sweep, f"j{number}", seconds, float(ord(sweep))), device, 1, float(ord(sweep)))
        queue.all_look(sorted(queue.waiting))
        assert len(queue.holders()) == 4
        before = [holder.who for holder in queue.holders()]
        trial = queue.join(trial_of("urgent", width, 9.0, 1e6), NODE, width, 1e6)
        for ended, who in enumerate(before, 1):
            queue.end(who)
            queue.held = {
                device: Holder(h.who, h.pid, h.since, h.claim and h.claim.with_job(left=0.01))
                for device, h in queue.held.items()
            }
            queue.all_look(data.draw(st.permutations(sorted(queue.waiting))))
            assert (trial not in queue.waiting) is (ended >= width)
            if trial not in queue.waiting:
                return


@pytest.mark.parametrize("priority", [9.0, -9.0])
@pytest.mark.parametrize("preempt", ["a", "b"])
@pytest.mark.parametrize("stopped", [None, 10.0])
def test_jobs_give_way_to_a_trial_of_a_higher_priority_where_they_may(
    priority: float, preempt: str, stopped: float | None
) -> None:
    """Those of ``b`` may, unless they did so just now; a plan that stands goes on where none needs them."""
    seconds = {("t", 1): (1e5, 1.0)}
    with closing(Queue()) as queue:
        for number in range(5):
            queue.join(job_of(preempt, f"j{number}", seconds, 1.0), (NODE[number % 4],), 1, 1.0)
        queue.all_look(sorted(queue.waiting))
        if stopped is not None:
            queue.held = {
                device: Holder(
                    h.who, h.pid, h.since, h.claim and h.claim.with_job(stopped=time.time() - stopped)
                )
                for device, h in queue.held.items()
            }
        queue.give_way()
        assert len(queue.holders()) == 4, "a plan that stands goes on"
        trial = queue.join(trial_of("trial", 2, priority, 9.0), NODE, 2, 9.0)
        assert not queue.look(trial)
        queue.give_way()
        gives_way = preempt == "b" and stopped is None and priority > 0
        assert len(queue.holders()) == (2 if gives_way else 4)
        assert queue.look(trial) is gives_way


@pytest.mark.parametrize("priority", [None, -9.0])
def test_a_plan_that_stands_widens_nobody_when_a_trial_comes(priority: float | None) -> None:
    """Decided anew, the job that runs would stop, to go on on two devices."""
    seconds = {("t", 1): (1e6, 1.0), ("t", 2): (5e5, 1.0)}
    with closing(Queue()) as queue:
        for number in range(2):
            queue.join(job_of("b", f"j{number}", seconds, 1.0), NODE[:1], 1, 1.0)
        queue.all_look(sorted(queue.waiting))
        if priority is not None:
            queue.join(trial_of("trial", 1, priority, 9.0), NODE, 1, 9.0)
        queue.give_way()
        assert len(queue.holders()) == 1
        assert len(queue.waiting) == (1 if priority is None else 2)


def test_a_trial_goes_before_a_job_of_its_priority_whose_deadline_presses() -> None:
    facts = SharedSweep("due", (), time.time(), 1e6, deadline=time.time() + 110)
    due = claim_of(facts, "due", "t", {("t", 4): (100.0, 1.0)}, 1.0)
    with closing(Queue()) as queue:
        job = queue.join(due, NODE, 4, 1.0)
        trial = queue.join(trial_of("trial", 4, 0.0, 2.0), NODE, 4, 2.0)
        assert not queue.look(job)
        assert queue.look(trial)


def test_a_trial_that_waited_out_of_proportion_goes_before_higher_priorities() -> None:
    for waited in (60.0, 3600.0):
        with closing(Queue()) as queue:
            job = queue.join(job_of("c", "urgent", {("t", 4): (100.0, 1.0)}, 1.0), NODE, 4, 1.0)
            trial = queue.join(trial_of("trial", 4, 0.0, 2.0, waited), NODE, 4, 2.0)
            assert queue.look(trial) is (waited > 1000)
            assert queue.look(job) is (waited < 1000)


def test_trials_leave_a_plan_as_it_is() -> None:
    job, trial = job_of("a", "one", {("t", 2): (100.0, 1.0)}, 1.0), trial_of("trial", 1, 0.0, 2.0)
    assert plan_stands([job, trial])
    assert not plan_stands([job, job_of("b", "one", {("t", 2): (100.0, 1.0)}, 2.0)])


def test_what_a_trial_tells_is_read_again_and_is_no_job_to_earlier_versions() -> None:
    told = Holder("w", 1, 0.0, trial_of("trial", 2, 9.0, 2.0)).to_dict()
    assert "claim" not in told
    assert Holder.read(told).claim == Holder.read({**told}).claim
    read = Holder.read(told).claim
    assert read is not None
    assert (read.sweep.trials, read.sweep.priority) == (True, 9.0)
    assert Holder.read({**told, "trial": {"sweep": 3}}).claim is None
