"""Turns at a node's devices: as planned while one sweep is alone, together when others come."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saturn_airflow import HParams, Job
from saturn_airflow.launch.giving_way import GivingWay, TurnsOfRun
from saturn_airflow.launch.lease_folder import LeaseFolder
from saturn_airflow.launch.leases import Lease, Waiter
from saturn_airflow.launch.run_spec import RunSpec
from saturn_airflow.launch.turn_at_node import Sharing
from saturn_airflow.model.claims import HERE, Claim, claim_of, claim_of_trial
from saturn_airflow.model.plan import Place
from saturn_airflow.model.sharing import Pace, SharedSweep, SharingRules
from saturn_airflow.sharing.at_a_node import decision_at_a_node, place_in

NODE = ("d0", "d1", "d2", "d3")
#: Seconds of a job by its number of devices.
WIDE = {("ddp", 4): (3000.0, 5.0), ("ddp", 2): (5000.0, 5.0), ("single", 1): (9000.0, 5.0)}


def claim(
    sweep: str, job: str, strategies: dict[tuple[str, int], tuple[float, float]], **facts: object
) -> Claim:
    own: dict[str, object] = {"arrived": 0.0, "alone": 1e9, **facts}
    facts_of_sweep = SharedSweep(sweep, (), **own)  # type: ignore[arg-type]
    return claim_of(facts_of_sweep, job, next(iter(strategies))[0], strategies, made=1.0)


def waiter(folder: Path, mine: Claim, devices: tuple[str, ...] = NODE, position: int = 0) -> Waiter:
    sharing = Sharing(mine, NODE, SharingRules(checkpoint=1.0, quiet=0.0))
    return Waiter(devices, mine.job.name, None, (mine.made, position), folder, sharing)


def trial_waiter(folder: Path, devices: int, priority: float = 0.0) -> Waiter:
    facts = SharedSweep("measured", (), time.time(), 0.0, priority)
    mine = claim_of_trial(facts, "trial", "ddp", devices, 9.0, {})
    return Waiter(NODE, "trial", devices, (9.0, 0), folder, Sharing(mine, NODE))


def take(one: Waiter) -> Lease:
    lease = one.take()
    assert lease is not None
    return lease


def test_a_sweep_that_is_alone_runs_as_planned(tmp_path: Path) -> None:
    first = waiter(tmp_path, claim("a", "one", WIDE))
    second = waiter(tmp_path, claim("a", "two", WIDE), position=1)
    with take(first) as lease, contextlib.closing(second):
        assert lease.devices == NODE
        assert lease.place is None
        assert second.take() is None


def test_deployments_that_share_a_node_may_have_sweeps_of_the_same_name(tmp_path: Path) -> None:
    staging = waiter(tmp_path, claim("nightly", "one", {("single", 1): (60.0, 1.0)}, arrived=1.0), NODE[:1])
    two = {("ddp", 2): (60.0, 1.0)}
    production = waiter(tmp_path, claim("nightly", "one", two, arrived=2.0), NODE[:2])
    with take(staging):
        taken = None
        for _ in range(2):  # at the first it hears that it is not alone
            taken = taken or production.take()
        assert taken is not None, "of four devices one is held"
        assert taken.place is not None
        assert (taken.place.technique, len(taken.devices)) == ("ddp", 2)
        taken.release()


def test_jobs_run_thriftily_when_other_sweeps_wait(tmp_path: Path) -> None:
    first = waiter(tmp_path, claim("a", "one", WIDE))
    other = waiter(tmp_path, claim("b", "one", WIDE))
    with take(first) as lease:
        assert lease.place is not None
        assert lease.place.devices < 4
        with take(other) as beside:
            assert not set(beside.devices) & set(lease.devices)


def test_the_short_sweep_goes_first_and_the_higher_priority_before_it(tmp_path: Path) -> None:
    short = {("single", 4): (10.0, 1.0)}
    long = waiter(tmp_path, claim("a", "long", WIDE))
    quick = waiter(tmp_path, claim("b", "quick", short))
    with contextlib.closing(long), contextlib.closing(quick):
        assert long.take() is None
        urgent = waiter(tmp_path, claim("c", "urgent", {("single", 4): (9000.0, 1.0)}, priority=1.0))
        assert quick.take() is None
        take(urgent).release()
        take(quick).release()
        take(long).release()


def test_what_is_left_of_sweeps_at_other_nodes_counts(tmp_path: Path) -> None:
    """Else whoever has least here would go first: who is nearly done would wait for each new sweep."""
    nearly_done = waiter(tmp_path, claim("a", "last", {("single", 4): (60.0, 1.0)}))
    new = claim("b", "first", {("single", 4): (30.0, 1.0)}, elsewhere=1000.0)
    assert Claim.from_dict(new.to_dict()) == new
    negative = replace(new, sweep=replace(new.sweep, elsewhere=-1.0))
    with pytest.raises(ValueError, match="elsewhere"):
        Claim.from_dict(negative.to_dict())
    with contextlib.closing(nearly_done), contextlib.closing(waiter(tmp_path, new)) as one_of_many:
        assert one_of_many.take() is None
        take(nearly_done).release()
        take(one_of_many).release()


def test_a_running_job_gives_way_where_it_may_and_that_pays(tmp_path: Path) -> None:
    for preempt in (False, True):
        mine = claim("a", "long", {("single", 4): (9000.0, 5.0)}, preempt=preempt)
        with take(waiter(tmp_path, mine)) as lease:
            stay = GivingWay(Sharing(mine, NODE, SharingRules(checkpoint=1.0, quiet=0.0)), lease, tmp_path)
            stay.note({"event": "start", "total_batches": 100, "step": 0})
            stay.note({"event": "step", "step": 25, "seconds": 0.1})
            stay._looked_at -= 10
            assert not stay.asked(), "nobody wants its devices"
            with contextlib.closing(
                waiter(tmp_path, claim("b", "quick", {("single", 4): (10.0, 1.0)}))
            ) as quick:
                stay._looked_at -= 10
                assert stay.asked() is preempt
                assert quick.take() is None, "its devices are still held"
                assert stay.next_claim().job.left == pytest.approx(0.75)
                if preempt:
                    lease.release()
                    again = waiter(tmp_path, stay.next_claim())
                    with contextlib.closing(again):
                        assert again.take() is None
                        take(quick).release()
                        take(again).release()


@pytest.mark.parametrize("steps", [3, 80])
def test_it_is_decided_by_the_pace_that_was_seen(tmp_path: Path, steps: int) -> None:
    """One that is nearly done does not leave, whatever its estimate said; the other has an hour to go."""
    mine = claim("a", "long", {("single", 4): (4000.0, 5.0)}, preempt=True)
    quick = claim("b", "quick", {("single", 4): (10.0, 1.0)})
    with take(waiter(tmp_path, mine)) as lease, contextlib.closing(waiter(tmp_path, quick)):
        sharing = Sharing(mine, NODE, SharingRules(checkpoint=20.0, quiet=0.0))
        stay = GivingWay(sharing, lease, tmp_path)
        stay.note({"event": "start", "total_batches": 100, "step": 0})
        stay._first = time.monotonic() - 100, 0.0, 0
        stay.note({"event": "step", "step": steps, "seconds": 0.1, "epoch": 1})
        stay._looked_at -= 10
        assert stay.asked() is (steps == 3)
        told = lease.holder.claim
        assert told is not None
        assert told.pace is not None
        assert (told.pace.share, told.pace.saw_epoch_end) == (steps / 100, True)
        assert told.pace.seconds == pytest.approx(100, abs=5)
        assert Claim.from_dict(told.to_dict()) == told
        left = stay.next_claim()
        assert left.pace is None
        expected = 100 / (steps / 100)
        assert left.job.job.options[0].seconds[HERE] == pytest.approx(5 + expected, rel=0.3)


def test_those_like_it_that_wait_are_expected_to_take_what_was_seen() -> None:
    runs = claim("a", "runs", {("single", 1): (4000.0, 5.0)})
    place = Place("single", 1, HERE, (0,))
    runs = replace(runs.with_job(place=place), pace=Pace(0.5, 100.0, True))
    sister, other = (
        claim("a", "waits", {("single", 1): (4000.0, 5.0)}),
        claim("b", "waits", {("single", 1): (2000.0, 5.0)}),
    )
    for pace, first in ((None, other), (runs.pace, sister)):
        holding = [replace(runs, pace=pace)]
        found = [
            place_in(decision_at_a_node([sister, other], holding, [2, 3], 4, 1000.0, SharingRules()), one)
            is not None
            for one in (sister, other)
        ]
        assert found == [first is sister, first is other], "one device is free"


@pytest.mark.parametrize(
    ("seconds", "pace"),
    [
        (1e-3, Pace(5e-324, 100.0, True)),
        (4000.0, Pace(1e-300, 1e300, True)),
        (4000.0, Pace(1e-200, 1e100, False)),
        (4000.0, Pace(1.0, 1e300, True)),
    ],
)
def test_whatever_pace_a_claim_tells_others_have_their_turns(seconds: float, pace: Pace) -> None:
    """Anybody may have written it."""
    runs = claim("a", "runs", {("single", 1): (seconds, 0.0)})
    runs = replace(runs.with_job(place=Place("single", 1, HERE, (0,))), pace=pace)
    waits = claim("b", "waits", {("single", 1): (100.0, 5.0)})
    assert place_in(decision_at_a_node([waits], [runs], [], 2, 1000.0, SharingRules()), waits) is not None


@pytest.mark.parametrize("pace", [{"share": 2.0, "seconds": 1.0}, {"share": 0.5, "seconds": -1.0}, [], 5])
def test_a_pace_that_can_not_be_is_no_claim(pace: Any) -> None:
    told = claim("a", "one", WIDE).to_dict()
    with pytest.raises(ValueError, match=r"claim"):
        Claim.from_dict({**told, "pace": pace})


def test_it_says_how_long_it_takes_to_leave_as_it_was_measured(tmp_path: Path) -> None:
    mine = claim("a", "long", {("single", 4): (9000.0, 5.0)}, preempt=True)
    sharing = Sharing(mine, NODE, SharingRules(checkpoint=50.0, quiet=0.0))
    quick = claim("b", "quick", {("single", 4): (10.0, 1.0)})
    for measured, expected in ((False, 50.0), (True, 2.0 + 0.25 + 1.0)):
        with take(waiter(tmp_path, mine)) as lease, contextlib.closing(waiter(tmp_path, quick)):
            stay = GivingWay(sharing, lease, tmp_path)
            stay.note({"event": "start", "total_batches": 100, "step": 0})
            stay.note({"event": "step", "step": 25, "seconds": 0.25})
            if measured:
                stay.note({"event": "checkpoint", "step": 25, "seconds": 2.0})
            stay._looked_at -= 10
            now = time.time()
            assert stay.asked()
            told = lease.holder.claim
            assert told is not None
            assert told.job.leaving == pytest.approx(now + expected, abs=1.0)
            took = stay.next_claim().job.leaves_in
            assert took is not None
            assert took < expected, "what it took counts from now on"


def test_a_folder_that_cannot_be_used_ends_no_training(tmp_path: Path) -> None:
    mine = claim("a", "long", {("single", 4): (9000.0, 5.0)}, preempt=True)
    with take(waiter(tmp_path / "leases", mine)) as lease:
        (tmp_path / "file").touch()
        stay = GivingWay(Sharing(mine, NODE), lease, tmp_path / "file" / "leases")
        stay._looked_at -= 10
        assert not stay.asked()


@pytest.mark.slow
def test_who_is_held_up_inside_the_folder_holds_up_no_training(tmp_path: Path) -> None:
    """Stopped by a signal, not killed: then the kernel would let go of the lock."""
    mine = replace(claim("a", "long", {("single", 4): (9000.0, 5.0)}, team="x"), shares={"x": 0.5})
    with take(waiter(tmp_path, mine)) as lease, contextlib.closing(waiter(tmp_path, mine)):
        stay = GivingWay(Sharing(mine, NODE), lease, tmp_path)
        with LeaseFolder(tmp_path).gate():
            stay._looked_at -= 10
            assert not stay.asked()
            stay.count_use()
        assert LeaseFolder(tmp_path).used() == {}


def test_a_trial_overtakes_jobs_that_wait(tmp_path: Path) -> None:
    one = take(Waiter(["d0", "d1", "d2"], "held", folder=tmp_path))
    with one, contextlib.closing(waiter(tmp_path, claim("a", "wide", WIDE))) as wide:
        assert wide.take() is None
        take(trial_waiter(tmp_path, 1)).release()
        with contextlib.closing(trial_waiter(tmp_path, 1, priority=-1.0)) as lower:
            assert lower.take() is None, "who waits for more is of a higher priority"
        with contextlib.closing(Waiter(NODE, "no trial", 1, (9.0, 0), tmp_path)) as other:
            assert other.take() is None


def test_a_trial_that_meets_two_sweeps_runs_as_it_was_listed(tmp_path: Path) -> None:
    """Its devices are decided together with those of jobs, and nothing else of it is."""
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(take(Waiter(["d0"], "held", folder=tmp_path)))
        for sweep in "ab":
            one = waiter(tmp_path, claim(sweep, "one", {("single", 4): (9000.0, 5.0)}))
            stack.enter_context(contextlib.closing(one))
            assert one.take() is None
        lease = stack.enter_context(take(trial_waiter(tmp_path, 2, 1.0)))
        assert lease.place is not None
        assert not set(lease.devices) & set(held.devices)
        assert lease.holder.claim is not None
        spec = RunSpec(
            job=Job("j", "m:a", "m:b", "m:c", hparams=HParams(batches=9)),
            technique="ddp",
            devices=2,
            folder=str(tmp_path),
            node="n",
            slots=4,
            mode="trial",
            claim=lease.holder.claim,
        )
        turn = TurnsOfRun(RunSpec.from_dict(spec.to_dict()), NODE)
        ids = [NODE.index(device) for device in lease.devices]
        told = {"names": list(lease.devices), "devices": ids, "technique": "ddp"}
        assert turn.begin(lease, tmp_path) == told
        turn.is_over()
        assert (turn.is_to_leave(), turn.ends(), turn.result()) == (False, False, {})
        assert LeaseFolder(tmp_path).used() == {}


def test_nodes_that_share_a_folder_do_not_mind_each_other(tmp_path: Path) -> None:
    others = ("e0", "e1", "e2", "e3")
    strategies = {("single", 4): (100.0, 1.0)}
    elsewhere = Waiter(
        others, "elsewhere", None, (1.0, 0), tmp_path, Sharing(claim("a", "elsewhere", strategies), others)
    )
    urgent = claim("b", "urgent", strategies, priority=1.0)
    with take(elsewhere), take(waiter(tmp_path, claim("a", "here", strategies, preempt=True))) as lease:
        assert lease.place is None
        with contextlib.closing(waiter(tmp_path, urgent)) as wants:
            assert wants.take() is None
            lease.release()
            assert take(wants).devices == NODE


def test_teams_have_their_shares_of_a_node(tmp_path: Path) -> None:
    work = {("single", 4): (1000.0, 1.0)}
    more = {("single", 4): (1500.0, 1.0)}
    shares = {"x": 0.5, "y": 0.5}
    x = replace(claim("a", "one", work, team="x"), shares=shares)
    y = replace(claim("b", "one", more, team="y"), made=2.0, shares=shares)
    with contextlib.closing(waiter(tmp_path, x)) as first, contextlib.closing(waiter(tmp_path, y)) as other:
        assert other.take() is None, "it has more to do"
        room = LeaseFolder(tmp_path)
        with room.gate():
            room.count_use("x", 4, 40000.0)
        assert first.take() is None, "its team used more than its share"
        take(other).release()
    # What was given out last counts for all, whatever was set when a job came.
    y = replace(y, shares={"x": 0.95, "y": 0.05})
    with contextlib.closing(waiter(tmp_path, x)) as first, contextlib.closing(waiter(tmp_path, y)) as other:
        assert other.take() is None
        take(first).release()


def test_what_a_job_had_counts_for_its_team(tmp_path: Path) -> None:
    for shares, counted in (({}, {}), ({"x": 0.5}, {"x": 4 * 100.0})):
        mine = replace(claim("a", "one", {("single", 4): (900.0, 1.0)}, team="x"), shares=shares)
        with take(waiter(tmp_path, mine)) as lease:
            stay = GivingWay(Sharing(mine, NODE), lease, tmp_path)
            stay._began -= 100.0
            stay.count_use()
        assert LeaseFolder(tmp_path).used() == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"at": 1.0}',
        '{"at": 1.0, "used": {"x": -1.0}}',
        '{"at": 1.0, "used": {"x": NaN}}',
        '{"at": "now", "used": {}}',
        '{"format": 9, "at": 1.0, "used": {"x": 1.0}}',
        "[" * 100_000,
    ],
)
def test_what_teams_used_is_none_where_that_is_damaged(tmp_path: Path, text: str) -> None:
    room = LeaseFolder(tmp_path)
    (tmp_path / "used").write_text(text)
    assert room.used() == {}
    assert list(room.ignored) == ["./used"]
    room.count_use("x", 1, 10.0)
    assert room.used() == pytest.approx({"x": 10.0}, rel=0.1)


def test_claims_of_one_device_harm_nobody() -> None:
    mine = claim("b", "urgent", {("single", 1): (100.0, 1.0)})
    held = [
        claim("a", name, {("single", 2): (100.0, 1.0)}).with_job(place=Place("single", 2, HERE, ids))
        for name, ids in (("one", (0, 1)), ("two", (1, 2)), ("three", (2, 9)))
    ]
    place = place_in(decision_at_a_node([mine], held, [], 4, 0.0, SharingRules()), mine)
    assert place is not None
    assert place.device_ids == (3,)


def test_what_is_no_claim_is_taken_for_none(tmp_path: Path) -> None:
    damaged: list[Any] = [None, 3, {}, {"sweep": {}}, {**claim("a", "x", WIDE).to_dict(), "made": "soon"}]
    for data in damaged:
        with pytest.raises(ValueError, match=r"no claim|could not convert"):
            Claim.from_dict(data)
    mine = claim("a", "x", WIDE, deadline=5.0)
    assert Claim.from_dict(mine.to_dict()) == mine


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_all_run_at_last_and_none_beside_another_on_a_device(tmp_path: Path, data: st.DataObject) -> None:
    widths = st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True)
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    waiting = []
    for number in range(data.draw(st.integers(1, 8))):
        sweep = data.draw(st.sampled_from("abc"))
        strategies = {("t", w): (data.draw(st.floats(1.0, 1e5)) / w, 0.5) for w in data.draw(widths)}
        mine = claim(sweep, f"job{number}", strategies, preempt=data.draw(st.booleans()))
        planned = NODE[: next(iter(strategies))[1]]
        waiting.append(waiter(folder, mine, planned, position=number))
    running: list[Lease] = []
    for _ in range(200):
        if not waiting:
            break
        for one in list(waiting):
            if (lease := one.take()) is not None:
                running.append(lease)
                waiting.remove(one)
        taken = [device for lease in running for device in lease.devices]
        assert len(taken) == len(set(taken))
        assert running or not waiting, "devices are free, and nobody starts"
        if running:
            running.pop(data.draw(st.integers(0, len(running) - 1))).release()
    assert not waiting
    for lease in running:
        lease.release()
